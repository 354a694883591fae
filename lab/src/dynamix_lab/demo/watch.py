"""The demo's runs while they go on: scored off their clock, shown, and stopped where they arrived."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

from dynamix.events.records import read_events
from dynamix.events.run_folder import RunFolder
from dynamix_lab.demo.settings import CENSOR_FACTOR
from dynamix_lab.emulator import Emulation
from dynamix_lab.harness.display import Display
from dynamix_lab.harness.folder import adopt_events
from dynamix_lab.harness.runs import PolicyRun, file_name
from dynamix_lab.harness.scoring import Scorer, WeightSnapshot
from dynamix_lab.opponents.launch import LiveRun, LiveWatch
from dynamix_lab.opponents.live import put_weights
from dynamix_lab.opponents.runs import HeldOut
from dynamix_lab.opponents.trial import Trial
from dynamix_lab.tasks import Workload


class DemoWatch(LiveWatch):
    """Follows one launch; a context manager, as it scores in a thread.

    runs     what is there of every run, the newest last; those of this launch are appended
    target   score at which a run has arrived
    stops    whether runs end there, or at three times static's time; else only their limits end them
    """

    def __init__(
        self,
        hosts: Emulation,
        folder: RunFolder,
        display: Display,
        runs: list[PolicyRun],
        trials: Mapping[str, Trial],
        scorer: Callable[[Tensor], float],
        *,
        seed: int,
        attempt: int,
        target: float,
        stops: bool,
    ) -> None:
        self.hosts, self.folder, self.display, self.runs, self.trials = hosts, folder, display, runs, trials
        self.seed, self.attempt, self.target, self.stops = seed, attempt, target, stops
        self._scorer = Scorer(scorer, self._scored)

    def __enter__(self) -> DemoWatch:
        return self

    def __exit__(self, *exception: object) -> None:
        self._scorer.close()

    def began(self, name: str) -> None:
        run = PolicyRun(name, self.seed, self.target, attempt=self.attempt)
        run.batch_sizes = self._first_sizes(name)
        self.runs.append(run)
        self.display.update(self.runs)

    def progress(self, name: str, time_s: float, samples: int, loss: float) -> None:
        run = self.runs[-1]
        run.time_s, run.samples, run.loss = time_s, samples, loss
        if self._events_of(name).exists() and (events := read_events(self._events_of(name))):
            run.batch_sizes = events[-1]["allocation"]
        self.display.update(self.runs)

    def snapshot(self, name: str, time_s: float, samples: int, path: Path) -> None:
        self._scorer.add(WeightSnapshot(name, time_s, 0, samples, path))

    def stop(self, name: str) -> bool:
        run, static = self.runs[-1], self._static_s()
        late = static is not None and run.time_s > CENSOR_FACTOR * static
        return self.stops and (run.time_to_target_s is not None or late)

    def finished(self, run: LiveRun) -> None:
        self._scorer.wait()
        mine, kept = self.runs[-1], run.run
        mine.snapshots = [
            WeightSnapshot(run.name, e.time_s, bisect.bisect(kept.meetings_s, e.time_s), e.samples, Path(), e.score)
            for e in kept.evaluations
        ]
        mine.step_ends_s, mine.time_s = list(kept.meetings_s), kept.time_s
        mine.samples, mine.step = kept.samples, kept.steps
        mine.devices, mine.stolen, mine.finished = run.devices, run.stolen, True
        labels = {"policy": run.name, "seed": self.seed} | ({"attempt": self.attempt} if self.attempt else {})
        mine.events = adopt_events(self.folder, self._events_of(run.name), **labels)
        if mine.events:
            mine.batch_sizes = mine.events[-1]["allocation"]
        reached = mine.time_to_target_s
        result = "target not reached" if reached is None else f"target after {reached:.1f} s"
        self.display.say(f"seed {self.seed}, {run.name}: {result}; {mine.samples} samples in {mine.time_s:.1f} s")
        self.display.update(self.runs)

    def _scored(self, snapshot: WeightSnapshot) -> None:
        """Called by the scorer's thread."""
        self.runs[-1].snapshots.append(snapshot)

    def _first_sizes(self, name: str) -> list[int]:
        trial = self.trials[name]
        return [trial.batch_size] * (1 if trial.kind == "single" else self.hosts.scenario.workers)

    def _events_of(self, name: str) -> Path:
        return self.hosts.run_dir / f"{file_name(name)}.events.jsonl"

    def _static_s(self) -> float | None:
        """Static's time to the target with this seed, once it has arrived."""
        finished = [run for run in self.runs if run.policy == "static" and run.seed == self.seed and run.finished]
        return finished[-1].time_to_target_s if finished else None


def scoring(workload: Workload, seed: int) -> Callable[[Tensor], float]:
    """Weights in a row -> their metric on the samples that runs are scored on at their end, too."""
    model, held_out = workload.make_model(0), HeldOut(workload, workload.make_data(seed).test)

    def value(weights: Tensor) -> float:
        put_weights(model, weights)
        return held_out.score(model)[1]

    return value
