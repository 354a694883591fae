"""A small model of a cluster that makes the windows of a trajectory."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from dynamix_lab.suites.decisions.corpus import PER_CLUSTER, PER_WORKER, Array, Trajectory, generator, normal
from dynamix_lab.suites.decisions.revision import found


class Story:
    """The cluster of one part of a trajectory: makes the next window from the sizes in force."""

    def __init__(self, spec: Trajectory, part: int) -> None:
        self.spec, self.part = spec, part
        windows, lead, workers = spec.parts[part]
        self.shape = shape = (*lead, workers)
        rng = generator(spec.seed, 1, part)
        second = 0.05 * 8.0 ** rng.random((*lead, 1))  # s that an average share takes
        self.beta = second / spec.share * 4.0 ** (rng.random(shape) - 0.5)
        self.alpha = spec.offset * second * 2.0 * rng.random(shape)
        self.exchange, self.overlap = second[..., 0] * 2.0 * rng.random(lead), 1.0 + 5.0 * rng.random(lead) ** 2
        self.cliff = spec.share * 4.0 ** rng.random(shape) if spec.cliffs else np.full(shape, np.inf)
        self.phi = spec.share * workers * 20.0 ** (rng.random(lead) - 0.3)
        count = int(spec.jumps * windows / 10)
        self.begins = (rng.random(count) * windows).astype(int)
        self.lasts = 1 + (15 * rng.random(count) ** 2).astype(int)
        self.slower = 0.6 + 4.0 * rng.random(count) ** 2
        wide = rng.random(count) < 0.2  # some slow all workers down alike
        self.struck = (rng.random((count, *shape)) < 1.0 / workers) | wide.reshape(-1, *[1] * len(shape))
        self.sizes = self._start(rng)
        self.narrowed = windows // 2 if rng.random() < 0.3 else windows
        self.step = np.zeros(lead)
        self.late: Array | None = None
        self.told: Any = None  # the window to tell again

    def _start(self, rng: np.random.Generator) -> Array:
        q = self.spec.quantum
        spread = 0.7 + 0.6 * rng.random(self.shape) if rng.random() < 0.5 else np.ones(self.shape)
        sizes = np.maximum(np.rint(self.spec.share * spread / q) * q, q).astype(np.int64)
        return np.asarray(np.minimum(sizes, int(self.spec.high * self.spec.share) // q * q))

    def bounds(self, t: int) -> Any:
        """What answer `t` of this part must satisfy."""
        spec, workers = self.spec, self.shape[-1]
        base = spec.share * workers
        ranges = {"wide": (None, None), "narrow": (base // 2, 2 * base), "fixed": (base, base)}
        low_total, high_total = ranges[spec.total]
        high = np.full(self.shape, int(spec.high * spec.share), dtype=np.int64)
        if t >= self.narrowed and workers > 2:
            high[..., 0] = max(spec.share, spec.quantum)
        total = {"total_low": low_total, "total_high": high_total}
        return found("Bounds").of(workers, spec.low, high, **total, quantum=spec.quantum, max_change=spec.max_change)

    def window(self, t: int) -> Any:
        """Window `t` of this part, of the sizes now in force."""
        if self.told is not None:
            told, self.told = self.told, None
            return told
        rng = generator(self.spec.seed, 2, self.part, t)
        fields = self._times(t, rng) | self._training(t, rng)
        self._lose(fields, rng)
        for name in self.spec.absent:
            fields[name] = np.full_like(fields[name], np.nan)
        return found("Window").of(self.sizes.copy(), micro_batches=float(self.spec.micro_batches), **fields)

    def _times(self, t: int, rng: np.random.Generator) -> dict[str, Array]:
        spec, shape, sizes = self.spec, self.shape, self.sizes
        low, high = spec.steps
        steps = np.floor(low + (high - low + 1) * rng.random(shape[:-1]))
        factor, torn = np.ones(shape), np.zeros(shape)
        for begin, last, slower, struck in zip(self.begins, self.lasts, self.slower, self.struck, strict=True):
            if begin <= t < begin + last:
                first = np.where(struck & (t == begin), rng.random(shape), 0.0)  # part of the window before it began
                torn = np.maximum(torn, np.sqrt(first * (1 - first)) * abs(slower - 1))
                factor = factor * np.where(struck, first + (1 - first) * slower, 1.0)
        beyond = 1.0 + 2.0 * np.maximum(sizes / self.cliff - 1.0, 0.0)
        busy = (self.alpha + self.beta * sizes * beyond) * factor * spec.micro_batches
        deviation = np.sqrt(spec.jitter**2 + torn**2) * (0.8 + 0.4 * rng.random(shape))
        compute = busy * np.exp(spec.jitter * normal(rng, shape) / np.sqrt(steps)[..., None])
        data = 0.05 * compute * rng.random(shape) ** 4
        slowest = (compute + data).max(-1) * (1.0 + spec.jitter * 0.4 * (shape[-1] > 1))
        whole = (slowest**self.overlap + self.exchange**self.overlap) ** (1 / self.overlap)
        exposed = (whole - slowest) * np.exp(0.1 * normal(rng, shape[:-1]))
        self.step = self.step + steps
        return {
            "compute": np.where(sizes > 0, compute, np.nan),
            "compute_std": deviation * compute,
            "wait": slowest[..., None] - compute - data,
            "communication": np.broadcast_to(exposed[..., None], shape).copy(),
            "data": data,
            "steps": steps,
            "step": self.step.copy(),
            "age": np.minimum(steps, 1.0 + t),
        }

    def _training(self, t: int, rng: np.random.Generator) -> dict[str, Array]:
        spec, shape, lead = self.spec, self.shape, self.shape[:-1]
        base = np.full(lead, float(spec.share * shape[-1] * spec.micro_batches))
        total = self.sizes.sum(-1) * spec.micro_batches
        phi = self.phi * spec.micro_batches * 1.03**t * np.maximum(total / base, 0.1) ** 0.2
        noise, signal = phi * np.exp(0.05 * normal(rng, lead)), np.ones(lead)
        chance = {"known": (0.0, 0.0), "mixed": (0.3, 0.02), "lost": (0.0, 0.4), "unknown": (1.0, 0.0)}[spec.noise]
        noise = np.where(rng.random(lead) < chance[0], np.nan, noise)
        signal = np.where(rng.random(lead) < chance[1], 0.0, signal)
        share = np.maximum(self.sizes, 1) * spec.micro_batches
        with np.errstate(invalid="ignore"):
            norms = (1.0 + phi[..., None] / share) * np.exp(0.1 * normal(rng, shape))
        made = {name: rng.random(shape) for name in ("cpu", "memory", "device", "accuracy", "accuracy_std", "loss_std")}
        return made | {
            "loss": 2.0 * 0.99**t + 0.1 * normal(rng, shape),
            "loss_change": normal(rng, shape),
            "accuracy_change": normal(rng, shape),
            "gradient_norm_sq": norms,
            "base_batch": base,
            "global_norm_sq": 1.0 + phi / np.maximum(total, 1),
            "noise": noise,
            "signal": signal,
            "bytes_per_s": 1e8 * rng.random(shape),
            "retransmits_per_s": 3 * rng.random(shape) ** 3,
            "rtt_s": 1e-3 * (0.1 + rng.random(shape)),
        }

    def _lose(self, fields: dict[str, Array], rng: np.random.Generator) -> None:
        """Put NaN, now and then another odd number, where this window was not measured."""
        if rng.random() >= self.spec.gaps:
            return
        kind, cut = int(rng.random() * 7), rng.random(self.shape)
        every = (*PER_WORKER, *PER_CLUSTER)
        some = [name for name in every if rng.random() < 0.2]
        if kind == 0:  # one worker or a few
            for name in PER_WORKER:
                fields[name] = np.where(cut <= cut.min(-1, keepdims=True) + 0.1, np.nan, fields[name])
        elif kind == 1:  # a few fields
            for name in some:
                fields[name] = np.full_like(fields[name], np.nan)
        elif kind == 2:  # all, but for the sizes
            for name in every:
                fields[name] = np.full_like(fields[name], np.nan)
        elif kind == 3:  # all of one cluster
            for name in PER_WORKER:
                fields[name] = np.where(cut[..., :1] < 0.5, np.nan, fields[name])
        elif kind == 4:  # cells
            for name in PER_WORKER:
                fields[name] = np.where(rng.random(self.shape) < 0.2, np.nan, fields[name])
        elif kind == 5:
            fields["steps"] = np.where(rng.random(fields["steps"].shape) < 0.7, np.nan, 0.0)
        else:  # what no clock should say; that a time is infinite, live learning takes otherwise than it did
            most = fields["compute"] if "learning" in self.spec.policy or "keen" in self.spec.policy else np.inf
            fields["compute"] = np.where(cut < 0.2, 0.0, np.where(cut > 0.9, most, fields["compute"]))
            fields["communication"] = np.where(cut[..., :1] < 0.5, -1e-6, fields["communication"])

    def answered(self, t: int, window: Any, sizes: Array) -> None:
        """Put the answer to `window` in force, or what happens instead."""
        rng = generator(self.spec.seed, 3, self.part, t)
        kind = int(rng.random() * 5) if rng.random() < self.spec.upsets else -1
        if self.late is not None:
            sizes, self.late = self.late, None
        if kind == 0:
            self.late = sizes
        elif kind == 1:
            self.sizes = self._forced(rng)
        elif kind in (2, 3):  # the same figures again, a step later: a window whose step is not later is ignored
            self.step = self.step + 1
            self.told = dataclasses.replace(window, step=self.step.copy())
        else:
            self.sizes = sizes

    def _forced(self, rng: np.random.Generator) -> Array:
        spec = self.spec
        sizes = self.sizes * np.exp(0.4 * normal(rng, self.shape)) + (rng.random() < 0.1)  # not always on the grid
        if spec.low == 0:
            sizes = np.where(rng.random(self.shape) < 0.2, 0.0, sizes)
        most = int(spec.high * spec.share)
        sizes = np.clip(np.rint(sizes / spec.quantum) * spec.quantum + (rng.random() < 0.05), spec.low, most).astype(
            np.int64
        )
        empty = sizes.sum(-1, keepdims=True) == 0
        return np.asarray(np.where(empty, spec.share, sizes), dtype=np.int64)
