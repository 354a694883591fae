"""`dynamix bench aggregator`: what one core carries, and hostile frames; resumable."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from dynamix.errors import ConfigError
from dynamix_homomorphic.aggregator.tls import TlsFiles
from dynamix_lab.harness.suite import Cell, Context, Suite
from dynamix_lab.report import Section, Table, number, percent, sections_markdown
from dynamix_lab.suites.aggregator.certificates import have_openssl, make_certificates
from dynamix_lab.suites.aggregator.crowd import crowd
from dynamix_lab.suites.aggregator.hostile import TARGETS
from dynamix_lab.suites.aggregator.returning import returning
from dynamix_lab.suites.aggregator.throughput import throughput
from dynamix_lab.suites.aggregator.waiting import waiting
from dynamix_lab.suites.fuzz.run import fuzz

Certified = tuple[TlsFiles, TlsFiles]  # of the aggregator, and of its workers
CELL = 25_000  # frames
GROWTH_MB = 64.0  # most that a process may grow by
LOST = 0.05  # most of a run's throughput that a loss and a return may cost
WAITING_S = 1.0  # most that a worker may wait where others say nothing
OF_LINE = 0.6  # of what the line carries: below it, Python is not enough
CROWD = "connections"
PARTS = {"handshakes": 0.3, "messages of workers": 0.48, "messages of an aggregator": 0.2, CROWD: 0.02}


@dataclass(frozen=True, slots=True)
class AggregatorPlan:
    """How many workers, of what buffers, how often and long; how many hostile frames, in cells of `cell`.

    returning_s   of a run in which the aggregator is lost and comes back; 0: none
    """

    workers: tuple[int, ...] = (8, 32)
    buffer_mb: int = 8
    repeats: int = 7
    seconds: float = 3.0
    returning_s: float = 60.0
    frames: int = 1_000_000
    seed: int = 0
    cell: int = CELL

    @classmethod
    def of(
        cls,
        *,
        quick: bool = False,
        workers: tuple[int, ...] | None = None,
        frames: int | None = None,
        seed: int = 0,
    ) -> AggregatorPlan:
        """The whole of it, or a part that takes a minute."""
        chosen = workers or (8, 32)
        if quick:
            few = 10_000 if frames is None else frames
            return cls(
                chosen,
                repeats=3,
                seconds=1.0,
                returning_s=12.0,
                frames=few,
                seed=seed,
                cell=max(1, min(CELL, few // 4)),
            )
        return cls(chosen, frames=1_000_000 if frames is None else frames, seed=seed)

    def check(self) -> None:
        if any(not 1 <= count <= 256 for count in self.workers):
            raise ConfigError("workers", list(self.workers), "1 to 256 each", "name numbers of workers")
        if self.frames < 0:
            raise ConfigError("frames", self.frames, "0 or more", "0 leaves hostile frames out")

    def frames_of(self, kind: str) -> list[int]:
        """How many frames of this kind each of its cells tries."""
        left, cells = round(self.frames * PARTS[kind]), []
        while left > 0:
            cells.append(min(left, self.cell))
            left -= cells[-1]
        return cells


@dataclass
class AggregatorSuite(Suite):
    """The harness' view."""

    plan: AggregatorPlan
    name: str = "aggregator"
    grows: ClassVar[frozenset[str]] = frozenset({"workers"})

    def facts(self) -> dict[str, Any]:
        goal = {"of_line": OF_LINE, "grown_mb": GROWTH_MB, "lost": LOST, "waiting_s": WAITING_S}
        return {"cluster": "processes of one machine, loopback", "seeds": [self.plan.seed], "goal": goal}

    def cells(self) -> Sequence[Cell]:
        found = [Cell(f"throughput-{workers}", ("throughput", workers)) for workers in self.plan.workers]
        found.append(Cell("waiting", ("waiting",)))
        if self.plan.returning_s:
            found.append(Cell("returning", ("returning",)))
        for kind in PARTS:
            for part, frames in enumerate(self.plan.frames_of(kind)):
                found.append(Cell(f"{kind.replace(' ', '-')}-{part}", (kind, part, frames)))
        return found

    def run(self, cell: Cell, context: Context) -> dict[str, Any]:
        kind, *rest = cell.what
        if kind == "returning":
            return {"kind": kind, **returning(self.plan.returning_s)}
        if kind in ("throughput", "waiting"):
            with tempfile.TemporaryDirectory() as folder:
                tls = make_certificates(Path(folder), "127.0.0.1") if have_openssl() else None
                return {"kind": kind, **(self._waiting(tls) if kind == "waiting" else self._throughput(rest[0], tls))}
        part, frames = rest
        seed = 1000 * self.plan.seed + part
        if kind == CROWD:
            return {"kind": kind, **crowd(frames, seed=seed)}
        return {"kind": kind, **_counted(fuzz(TARGETS[kind](), inputs=frames, seed=seed))}

    def _throughput(self, workers: int, tls: Certified | None) -> dict[str, Any]:
        plan = self.plan
        return throughput(
            workers, total_bytes=plan.buffer_mb << 20, repeats=plan.repeats, seconds=plan.seconds, tls=tls
        )

    def _waiting(self, tls: Certified | None) -> dict[str, Any]:
        return {"plain": waiting(None), **({} if tls is None else {"over TLS": waiting(tls)})}

    def conclude(self, cells: Mapping[str, Any]) -> dict[str, Any]:
        hostile: dict[str, Any] = {}
        for key, cell in cells.items():
            if cell["kind"] not in PARTS:
                continue
            told = hostile.setdefault(cell["kind"], {"grown_mb": 0.0, "escapes": {}})
            for name in COUNTS:
                told[name] = round(told.get(name, 0) + cell.get(name, 0), 1)
            told["grown_mb"] = max(told["grown_mb"], cell["grown_mb"])
            told["escapes"] |= {f"{key}: {what}": about for what, about in cell["escapes"].items()}
        whole = {name: sum(told[name] for told in hostile.values()) for name in COUNTS}
        rates = [cell for cell in cells.values() if cell["kind"] == "throughput"]
        alone = {name: cells.get(name) for name in ("waiting", "returning")}
        return {"throughput": rates, **alone, "hostile": hostile, "frames": whole}

    def table(self, result: Mapping[str, Any]) -> str:
        return sections_markdown(sections(result))


COUNTS = ("inputs", "taken", "refused", "wrong", "hung", "other", "seconds")


def _counted(found: dict[str, Any]) -> dict[str, Any]:
    """What `fuzz` found, with wrong sums and hangs apart from other errors."""
    kinds = {"wrong": 0, "hung": 0, "other": 0}
    names = {"WrongSum": "wrong", "Hung": "hung"}
    for key, about in found["escapes"].items():
        kinds[names.get(key.partition(" ")[0], "other")] += about["times"]
    return {"taken": 0, "refused": 0, **found, **kinds}


def sections(result: Mapping[str, Any]) -> list[Section]:
    """Rates, a loss, and hostile frames."""
    whole = result["frames"]
    said = f"{whole['inputs']:,.0f} frames: {whole['wrong']:.0f} wrong sums, {whole['hung']:.0f} hangs"
    escapes = [f"{what}: {about}" for told in result["hostile"].values() for what, about in told["escapes"].items()]
    return [
        Section("What one core carries", [RATES], _rates(result)),
        *([] if result["waiting"] is None else [Section("Let in beside silent connections", [], _waiting(result))]),
        *([] if result["returning"] is None else [Section("Lost and joined again", [], _returning(result))]),
        Section("Hostile frames", [f"{said}, {whole['other']:.0f} other errors."], _hostile(result), notes=escapes),
    ]


RATES = (
    "Bytes of all workers' buffers, received and sent back. The line is an echo on the same core, over TLS beside an "
    "aggregator over TLS; memory is how fast that core copies."
)


def _rates(result: Mapping[str, Any]) -> Table:
    goal = percent(result["goal"]["of_line"])
    heads = [
        *("workers", "what answers", "GB/s", "GB/s a core", "core busy"),
        *(f"of the line (goal: {goal})", "of the line, a core", "of memory, a core"),
    ]
    rows = []
    for cell in result["throughput"]:
        for kind, found in cell["contenders"].items():
            rates = (found["bytes_per_s"], found["bytes_per_core_s"])
            parts = (found["busy"], found["of_line"], found["of_line_core"], found["of_memory"])
            rows.append([str(cell["workers"]), kind, *(number(r / 1e9, 2) for r in rates), *map(percent, parts)])
        rows.append(
            [str(cell["workers"]), "copying memory", "–", number(cell["memory_copy_bytes_per_s"] / 1e9, 2), *"––––"]
        )
    return Table(heads, rows)


def _waiting(result: Mapping[str, Any]) -> Table:
    goal = f"longest, ms (goal: {1e3 * result['goal']['waiting_s']:.0f})"
    found = {kind: told for kind, told in result["waiting"].items() if kind != "kind"}
    rows = [
        [kind, str(told["idle"]), number(1e3 * told["median_s"], 1), number(1e3 * told["longest_s"], 1)]
        for kind, told in found.items()
    ]
    return Table(["line", "silent connections", "a worker is in after, ms", goal], rows)


def _returning(result: Mapping[str, Any]) -> Table:
    found, goal = result["returning"], percent(result["goal"]["lost"])
    heads = ["run, s", "steps", "a step, ms", "without it, ms", "found out, ms", "joining, ms", "steps until joined"]
    times = (found[name] for name in ("aggregator_step_s", "group_step_s", "loss_s", "joining_s"))
    counts = [number(found["seconds"], 0), f"{found['steps']:,}"]
    lost = f"{100 * found['share']:.2f} %"
    row = [*counts, *(number(1e3 * value, 1) for value in times), str(found["steps_until_joined"]), lost]
    return Table([*heads, f"lost of the run (goal: {goal})"], [row])


def _hostile(result: Mapping[str, Any]) -> Table:
    goal = result["goal"]["grown_mb"]
    heads = [
        "frames",
        "tried",
        "taken",
        "refused",
        "wrong sums",
        "hangs",
        "other errors",
        f"growth, MB (goal: {goal:g})",
    ]
    rows = [
        [kind, *(f"{told[name]:,.0f}" for name in COUNTS[:-1]), number(told["grown_mb"], 0)]
        for kind, told in result["hostile"].items()
    ]
    return Table(heads, rows)
