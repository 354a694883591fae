"""One training run as its parent recorded it, and many of them as result.json."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from dynamix.plugins import POLICIES, plug_ins
from dynamix.policies.learned.policy import PRETRAINED
from dynamix.policies.registry import BUILT_IN, OtherFactory, parse_name
from dynamix.window import Window
from dynamix_lab.emulator.devices import DeviceSteps, too_many_overruns
from dynamix_lab.harness.scoring import WeightSnapshot
from dynamix_lab.statistics import censored, paired_ratio, time_to_target

AGAIN = "static-again"  # the A/A partner: static once more
CENSOR_FACTOR = 2.0
A_A_LIMIT = 0.05  # if A/A pairs differ by more, a call measures the machine, not policies


def file_name(policy: str) -> str:
    """`policy` as part of a file name.

    >>> file_name("static:64"), file_name("rules/mine.py:Mine")
    ('static-64', 'rules%2Fmine.py-Mine')
    """
    return quote(policy, safe="").replace("%3A", "-")


@dataclass
class PolicyRun:
    """The result of one policy with one seed. Filled during the run; `finished` after its last step."""

    policy: str
    seed: int
    target: float
    snapshots: list[WeightSnapshot] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    time_s: float = 0.0
    step: int = 0
    samples: int = 0
    loss: float = float("nan")
    batch_sizes: list[int] = field(default_factory=list)
    step_ends_s: list[float] = field(default_factory=list)
    overhead_s: float = 0.0
    stolen: float = float("nan")  # fraction of the machine's processor time that its hypervisor gave to others
    finished: bool = False
    attempt: int = 0  # earlier attempts were disturbed and discarded
    devices: tuple[DeviceSteps, ...] = ()  # each host's device steps; empty for hosts without a device

    def owns(self, event: dict[str, Any]) -> bool:
        """Whether a line of events.jsonl belongs to this run."""
        return (event["policy"], event["seed"], event.get("attempt", 0)) == (self.policy, self.seed, self.attempt)

    def to_dict(self) -> dict[str, Any]:
        """The run as JSON, without its events, which are in events.jsonl."""
        kept = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("events", "snapshots")}
        kept |= {name: None if math.isnan(kept[name]) else kept[name] for name in ("loss", "stolen")}
        snapshots = [{**asdict(snapshot), "path": ""} for snapshot in self.snapshots]
        return {**kept, "snapshots": snapshots, "devices": [asdict(device) for device in self.devices]}

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any]) -> PolicyRun:
        """The inverse of `to_dict`."""
        known: dict[str, Any] = {name: value for name, value in entry.items() if name != "snapshots"}
        known |= {name: float("nan") for name in ("loss", "stolen") if known.get(name) is None}
        snapshots = [WeightSnapshot(**{**snapshot, "path": Path(snapshot["path"])}) for snapshot in entry["snapshots"]]
        devices = tuple(DeviceSteps(**device) for device in known.pop("devices", ()))
        return cls(**known, snapshots=snapshots, devices=devices)

    @property
    def time_to_target_s(self) -> float | None:
        """Seconds from the barrier to the target, or None if it was not (yet) reached."""
        return time_to_target([s.time_s for s in self.snapshots], [s.score for s in self.snapshots], self.target)

    @property
    def overrun(self) -> bool:
        """Whether the machine was too slow for the devices, so that the run is no measurement."""
        return bool(self.devices) and too_many_overruns(self.devices)

    @property
    def accuracy(self) -> float:
        """The accuracy of the newest scored snapshot."""
        return self.snapshots[-1].score if self.snapshots else float("nan")

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.time_s if self.time_s else float("nan")

    def where_time_went(self) -> dict[str, list[float]]:
        """Mean seconds per step of each worker: compute, wait, communication, data. Over all windows, by steps."""
        windows = [Window.from_dict(event["window"]) for event in self.events if not event.get("short")]
        parts = {}
        weights = np.array([w.steps for w in windows])
        for name in ("compute", "wait", "communication", "data"):
            values = np.array([np.broadcast_to(np.nan_to_num(getattr(w, name)), w.batch_size.shape) for w in windows])
            parts[name] = (values * weights[:, None]).sum(0) / weights.sum() if windows else np.zeros(0)
        return {name: [float(v) for v in value] for name, value in parts.items()}

    @property
    def wait_fraction(self) -> float:
        """Fraction of all workers' step time that was spent waiting for slower workers. NaN if a worker's time is
        unknown.
        """
        if not any(np.isfinite(Window.from_dict(event["window"]).wait).any() for event in self.events):
            return float("nan")
        parts = self.where_time_went()
        total = sum(sum(values) for values in parts.values())
        return sum(parts["wait"]) / total if total else float("nan")

    @property
    def median_global_batch(self) -> float:
        """Median over the run's windows, samples."""
        return float(np.median([sum(e["window"]["batch_size"]) for e in self.events])) if self.events else float("nan")

    def event_time_s(self, event: dict[str, Any]) -> float:
        """When the window of `event` closed, on the run's clock (events have rank 0's own)."""
        step = int(event["window"]["step"])
        return self.step_ends_s[min(step, len(self.step_ends_s)) - 1] if self.step_ends_s else float("nan")

    @property
    def sizes_over_time(self) -> list[list[Any]]:
        """`[time_s, sizes]` at each change of the workers' sizes, from the first window on."""
        found: list[list[Any]] = []
        for event in self.events:
            if event.get("allocation") and (not found or event["allocation"] != found[-1][1]):
                found.append([_rounded(self.event_time_s(event)), event["allocation"]])
        return found


def summarise(runs: Sequence[PolicyRun]) -> dict[str, Any]:
    """The `policies` and `ratios` part of result.json: lists by seed, ratios over pairs with the same seed.

    A run that did not arrive counts at twice static's time.
    """
    names = list(dict.fromkeys(run.policy for run in runs))
    by_policy = {name: sorted((r for r in runs if r.policy == name), key=lambda r: r.seed) for name in names}
    return {
        "seeds": sorted({run.seed for run in runs}),
        "policies": {name: _policy_part(mine) for name, mine in by_policy.items()},
        "ratios": _ratios(by_policy),
        "a_a": _a_a(by_policy),
    }


def policy_facts(policy: str, others: Mapping[str, OtherFactory] | None = None) -> dict[str, str]:
    """Which policy runs under a name: the shipped file, another file (with its hash), or the rule of that name (with
    its distribution, if that is another than dynamix).

    others   as in `make_policy`
    """
    chosen = parse_name(policy, others=others)
    path = PRETRAINED if str(chosen) == "dynamix" else Path(chosen.base)
    named = {"name": "shipped" if path == PRETRAINED else policy}
    entry = plug_ins(POLICIES, BUILT_IN).get(chosen.base) if chosen.kind == "plain" else None
    if entry is not None and entry.dist is not None:
        named["distribution"] = f"{entry.dist.name} {entry.dist.version}"
    return {**named, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()} if path.is_file() else named


def _a_a(by_policy: dict[str, list[PolicyRun]]) -> dict[str, Any] | None:
    """Static against itself: the ratio, and whether the call is trustworthy. None without such pairs."""
    ratio = _ratios(by_policy).get(f"{AGAIN}/static")
    if ratio is None:
        return None
    return {**ratio, "limit": A_A_LIMIT, "within": bool(abs(ratio["median"] - 1) <= A_A_LIMIT)}


def _policy_part(runs: Sequence[PolicyRun]) -> dict[str, Any]:
    return {
        "time_to_target_s": [_rounded(r.time_to_target_s) for r in runs],
        "final_accuracy": [_rounded(r.accuracy) for r in runs],
        "samples_per_s": [_rounded(r.samples_per_s) for r in runs],
        "wait_fraction": [_rounded(r.wait_fraction) for r in runs],
        "time_s": [_rounded(r.time_s) for r in runs],
        "steps": [r.step for r in runs],
        "samples": [r.samples for r in runs],
        "batch_sizes": [r.batch_sizes for r in runs],
        "sizes_over_time": [r.sizes_over_time for r in runs],
        "median_global_batch": [_rounded(r.median_global_batch) for r in runs],
        "overhead_s": [_rounded(r.overhead_s) for r in runs],
        "stolen_fraction": [_rounded(r.stolen) for r in runs],
        "attempts": [r.attempt + 1 for r in runs],
        "seconds_per_step": [
            {name: [_rounded(v) for v in values] for name, values in r.where_time_went().items()} for r in runs
        ],
        "curve": [[[_rounded(s.time_s), s.samples, _rounded(s.score)] for s in r.snapshots] for r in runs],
    }


def _ratios(by_policy: dict[str, list[PolicyRun]]) -> dict[str, Any]:
    """Every policy over static, and dynamix over its other references. Empty if static never arrived."""
    out: dict[str, Any] = {}
    bounds = {r.seed: r.time_to_target_s for r in by_policy.get("static", [])}
    limits = {seed: CENSOR_FACTOR * bound for seed, bound in bounds.items() if bound is not None}
    wanted = [(name, "static") for name in by_policy if name != "static"]
    others = ("reference", "dbs", "single", "local")
    wanted += [("dynamix", other) for other in others if other in by_policy and "dynamix" in by_policy]
    for name, base in wanted:
        partners = {r.seed: r.time_to_target_s for r in by_policy.get(base, [])}
        pairs = [
            censored([run.time_to_target_s, partners[run.seed]], [limits[run.seed]] * 2)
            for run in by_policy[name]
            if run.seed in partners and run.seed in limits
        ]
        if pairs:
            above, below = zip(*pairs, strict=True)
            out[f"{name}/{base}"] = {**paired_ratio(above, below).to_dict(), "pairs": len(pairs)}
    return out


def _rounded(value: float | None) -> float | None:
    return None if value is None or not np.isfinite(value) else round(float(value), 5)
