"""Combines the ranks' rows step by step, and cuts them into windows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dynamix.errors import StateError
from dynamix.observe.rank_file import ranks_in, read_rank
from dynamix.observe.recorder import FIELDS, PARTS
from dynamix.probes.timing import RECENT, attribute_wait, pause_in
from dynamix.window import Floats, Ints, Window

WARM_UP = 3  # first steps, which choose kernels and build buckets; left out in longer jobs
LEAST_WINDOW, MOST_WINDOWS = 5, 1_000
_UNKNOWN_SIZE = 1  # samples assumed for a batch of unknown size
_BUSY = ("forward", "backward", "update", "between")


@dataclass(frozen=True)
class Joined:
    """Steps that all present ranks have completed, and facts about the ranks.

    ranks     ranks with a file; `world` is the job's number of ranks
    rows      (fields, steps, ranks) by `FIELDS`, seconds
    kept      (steps,) bool: neither warm-up nor a pause
    pauses    steps with a pause
    facts     of each rank's file
    attempt   number of restarts before this attempt
    """

    ranks: list[int]
    world: int
    rows: Floats
    kept: np.ndarray
    pauses: list[int]
    facts: list[dict[str, Any]]
    attempt: int

    def part(self, name: str) -> Floats:
        """(steps, ranks) of one field."""
        return np.asarray(self.rows[FIELDS.index(name)])

    @property
    def steps(self) -> int:
        """Number of steps that all present ranks have written."""
        return int(self.rows.shape[1])

    @property
    def samples_known(self) -> bool:
        """Whether the forward's inputs showed how many samples a batch has."""
        return bool(np.isfinite(self.part("samples")).all())

    @property
    def busy(self) -> Floats:
        """(steps, ranks) seconds of a step without waiting for others; NaN if not measured."""
        return np.asarray(sum(self.part(name) for name in _BUSY))

    @property
    def waits(self) -> tuple[Floats, Floats]:
        """Mean seconds (ranks,) that each rank waited for later ones, and of the transfer, over the kept steps."""
        return attribute_wait(self.part("exchange")[self.kept])

    @property
    def missing(self) -> list[int]:
        """Ranks that have written nothing."""
        return sorted(set(range(self.world)) - set(self.ranks))

    @property
    def predictable(self) -> bool:
        """Whether gains can be predicted: every rank's work is known, and no controller has changed it already."""
        return not self.missing and not self.facts[0].get("controller")

    @property
    def unfinished(self) -> list[int]:
        """Ranks whose file does not say that they ended."""
        return [rank for rank, facts in zip(self.ranks, self.facts, strict=True) if not facts.get("ended")]


def join(folder: Path) -> Joined:
    """The steps that the ranks have written since the job last started. Raises `StateError` if there are none."""
    starts = [int(path.name) for path in (folder / "ranks").glob("*") if path.name.isdigit() and ranks_in(path)]
    if not starts:
        why = "no rank has trained a model under DistributedDataParallel or fully_shard there, or none has ended a step"
        raise StateError(f"{folder} holds no observed steps: {why}")
    place = folder / "ranks" / str(max(starts))
    found = [read_rank(place, rank) for rank in ranks_in(place)]
    steps = min(len(one.rows) for one in found)
    rows = np.stack([one.rows[:steps].T for one in found], -1)
    facts = [one.facts for one in found]
    kept, pauses = _kept(rows)
    world = max(int(one.get("world", 1)) for one in facts)
    return Joined([int(one["rank"]) for one in facts], world, rows, kept, pauses, facts, max(starts))


def _kept(rows: Floats) -> tuple[np.ndarray, list[int]]:
    """(steps,) whether each step counts, and the indices of steps with a pause."""
    steps = rows.shape[1]
    whole = sum(np.nan_to_num(rows[FIELDS.index(name)]) for name in PARTS)
    longest = np.asarray(whole).max(-1, initial=0.0)
    kept = np.ones(steps, dtype=bool)
    kept[: WARM_UP if steps > 5 * WARM_UP else min(1, steps - 1)] = False
    pauses = []
    for start in range(0, steps, RECENT):
        at = np.arange(start, min(start + RECENT, steps))
        at = at[kept[at]]
        before = longest[max(start - RECENT, 0) : start][kept[max(start - RECENT, 0) : start]]
        paused = pause_in(longest[at].tolist(), before.tolist()) if len(at) > 2 else None
        if paused is not None:
            pauses.append(int(at[paused]))
            kept[at[paused]] = False
    return kept, pauses


def windows(job: Joined) -> Iterator[tuple[Window, dict[str, Any]]]:
    """Windows of the job in order, each with the seconds of its parts, by name and rank.

    A window is a few steps of the same sizes; if sizes change all the time it has their mean.
    """
    length = max(LEAST_WINDOW, -(-job.steps // MOST_WINDOWS))
    sizes = job.part("samples") if job.samples_known else np.full(job.part("samples").shape, float(_UNKNOWN_SIZE))
    for start in range(0, job.steps, length):
        at = np.arange(start, min(start + length, job.steps))
        at = at[job.kept[at]]
        for group in _alike(sizes, at):
            yield _window(job, sizes, group)


def _alike(sizes: Floats, at: Ints) -> list[Ints]:
    """The steps `at` in groups of the same sizes, ordered by their last step; one group if there were many."""
    kinds, which = np.unique(sizes[at], axis=0, return_inverse=True)
    if len(kinds) > 2:
        return [at]
    groups = [at[which.reshape(-1) == kind] for kind in range(len(kinds))]
    return sorted(groups, key=lambda group: int(group[-1]))


def _window(job: Joined, sizes: Floats, at: Ints) -> tuple[Window, dict[str, Any]]:
    compute = sum(job.part(name)[at] for name in ("forward", "backward", "update"))
    waits, transfer = attribute_wait(job.part("exchange")[at])
    parts = {name: _mean(job.part(name)[at]) for name in (*PARTS, "loader")}
    count = np.maximum(np.rint(sizes[at].mean(0)), 1).astype(np.int64)
    base = float(np.rint(np.median(sizes[job.kept].sum(-1))))
    window = Window.of(
        count,
        compute=_mean(np.asarray(compute)),
        compute_std=np.asarray(compute).std(0),
        wait=waits,
        communication=transfer,
        data=parts["between"],
        steps=float(len(at)),
        age=float(at[0]),
        step=float(at[-1] + 1),
        micro_batches=float(np.rint(job.part("passes")[at].mean())),
        base_batch=base,
    )
    told = {name: [round(float(x), 7) if np.isfinite(x) else None for x in values] for name, values in parts.items()}
    end_s = float(job.part("end_s")[at[-1]].max())
    seen = float(np.nansum(sizes[: at[-1] + 1]))
    return window, {"parts": told, "time_s": round(end_s, 3), "samples_seen": int(seen) if job.samples_known else None}


def _mean(values: Floats) -> Floats:
    """Mean over steps, (ranks,), of the measured values."""
    known = np.isfinite(values)
    with np.errstate(invalid="ignore"):
        return np.asarray(np.where(known, values, 0.0).sum(0) / np.where(known.any(0), known.sum(0), np.nan))
