"""The damaged inputs and their required outcomes: states, events, policy files, scenarios and traces, and an
aggregator's frames.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import dynamix
from dynamix.errors import DynamixError, StateError
from dynamix.events.records import EventLog, read_events
from dynamix.events.replay import recorded
from dynamix.policies import make_policy
from dynamix.probes.timing import CpuClock
from dynamix.runtime.state.packing import checksum, pack, unpack
from dynamix.window import Window
from dynamix_lab import emulator, papers
from dynamix_lab.emulator.loading import load_scenario, shipped_scenarios
from dynamix_lab.emulator.traces import parse_trace, read_trace
from dynamix_lab.opponents.trial import FIXED_TOTAL
from dynamix_lab.suites.fuzz import mutations
from dynamix_lab.suites.fuzz.frames import AggregatorsMessages, Handshakes, WorkersMessages

POLICIES = ("goodput", "dynamix", "stigmergic", "lb_bsp", "dynamix-paper", "pollux", "cannikin", "noise_scale", "dbs")
SAMPLES = 200


class Different(AssertionError):
    """An accepted input differs from what is written again, or trains otherwise than an undamaged job."""


class Target(Protocol):
    """One kind of input, by `name`."""

    name: str

    def attempt(self, rng: random.Random) -> bool:
        """Make one and try it. True if it was accepted, False if it was refused."""


class Job:
    """A small job in one process."""

    def __init__(self, policy: str, **options: Any) -> None:
        torch.manual_seed(0)
        x = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1))
        self.data = TensorDataset(x, (x.sum(1) > 0).long())
        net = nn.Linear(4, 2)
        self.optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        options["global_batch"] = "fixed" if policy in FIXED_TOTAL else "adaptive"
        self.controller = dynamix.Controller(policy, batch_size=4, interval=2, **options)
        partition = "contiguous" if policy == "dbs" else "stream"
        self.sampler = self.controller.batch_sampler(self.data, partition=partition)  # type: ignore[arg-type]
        self.model = self.controller.wrap(net, self.optimizer)

    def train(self, steps: int | None = None) -> list[int]:
        seen: list[int] = []
        for n, batch in enumerate(iter(self.sampler), 1):
            x, y = self.data[batch]
            loss = F.cross_entropy(self.model(x), y)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.controller.step(loss=loss)
            seen += batch
            if n == steps:
                break
        return seen


class States:
    """States of jobs with every policy, with valid checksums. One in `every` that is accepted is trained to its end."""

    name = "states"
    every = 20

    def __init__(self) -> None:
        self.jobs, self.states = list[Job](), list[dict[str, Any]]()
        ticks = itertools.count()
        # Inputs must be reproducible, so the damaged state must not depend on time or on this process's draws.
        with patch.object(CpuClock, "mark", lambda clock: 0.001 * next(ticks)):
            for policy in POLICIES:
                random.seed(0)
                np.random.seed(0)
                job = Job(policy)
                job.train(9)
                self.jobs.append(job)
                self.states.append(job.controller.state_dict())
        self.taken = self.trained = 0

    def attempt(self, rng: random.Random) -> bool:
        at = rng.randrange(len(self.jobs))
        job, state = self.jobs[at], dict(self.states[at])
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            state = damaged(state, rng) if type(state) is dict and state.keys() >= _PARTS else state
        try:
            state["checksum"] = checksum(state)
        except (AttributeError, StateError, TypeError):
            state = {**state, "checksum": ""} if type(state) is dict else state
        try:
            job.controller.load_state_dict(state)
        except DynamixError:
            return False
        again = job.controller.state_dict()
        for name in ("world_size", "base_batch", "progress", "ledger_rounds", "ledger_sizes", "source"):
            if checksum({"": again[name]}) != checksum({"": state[name]}) and not _narrowed(name, state, again):
                raise Different(f"{name}: {state[name]!r} became {again[name]!r}")
        if checksum({"": again["policy"]}) != checksum({"": state["policy"]}):
            raise Different(f"policy: {state['policy'][0][:300]} became {again['policy'][0][:300]}")
        self.taken += 1
        if self.taken % self.every == 0:
            self._train_out(job, state)
        return True

    def _train_out(self, job: Job, state: dict[str, Any]) -> None:
        place = state["source"]
        job.sampler.set_epoch(place["epoch"])
        try:
            seen = job.train()
        except DynamixError:
            return
        finally:
            self.trained += 1
        if len(seen) != SAMPLES - place["position"] or len(set(seen)) != len(seen):
            raise Different(f"{len(seen)} samples were trained on after position {place['position']}")


def _narrowed(name: str, state: dict[str, Any], again: dict[str, Any]) -> bool:
    """Whether a ledger differs because it was put within this job's bounds, as it must be."""
    if name == "progress":
        return {**state[name], "opens": 0} == {**again[name], "opens": 0} or repr(state[name]) == repr(again[name])
    return name.startswith("ledger") and len(again["ledger_sizes"]) == 1


_PACKED = ("policy", "schedules", "hooks", "ranks")
_PLAIN = ("progress", "source", "ledger_rounds", "ledger_sizes", "noise_scale")
_PARTS = {*_PACKED, *_PLAIN}


def damaged(state: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """A state with a change in one of its parts, mostly inside the packed data."""
    how, name = rng.random(), rng.choice(_PACKED)
    if how < 0.5:
        try:
            return {**state, name: pack(mutations.value(unpack(state[name]), rng))}
        except StateError:
            return state
    if how < 0.6:
        return {**state, name: mutations.value(state[name], rng)}
    if how < 0.8:
        name = rng.choice(_PLAIN)
        return {**state, name: mutations.value(state[name], rng)}
    changed: dict[str, Any] = mutations.value(state, rng)
    return changed


class Events:
    """Files of events, read and replayed."""

    name = "events"

    def __init__(self, folder: Path) -> None:
        self.file = folder / "events.jsonl"
        rng = np.random.default_rng(0)
        for workers in (2, 80):
            sizes = np.full(workers, 16)
            window = Window.of(sizes, compute=rng.random(workers), wait=0.1, step=5.0, micro_batches=2)
            with EventLog(self.file) as log:
                told = {"allocation": sizes.tolist(), "from_step": 4, "decision": "new", "noise": 1.0, "signal": None}
                log.write(window_index=0, window=window, **told, samples_seen=64, time_s=1.5)
        self.lines = [json.loads(line) for line in self.file.read_text().splitlines()]

    def attempt(self, rng: random.Random) -> bool:
        line = rng.choice(self.lines)
        if rng.random() < 0.5:
            try:
                text = json.dumps(mutations.value(line, rng), default=str)
            except (ValueError, TypeError, RecursionError):
                text = "[" * 5000
        else:
            text = mutations.text(json.dumps(line), rng)
        self.file.write_bytes(text.encode("utf-8", errors="surrogatepass") + b"\n")
        try:
            events = read_events(self.file)
            recorded(self.file, len(line["allocation"]))
        except DynamixError:
            return False
        again = [json.loads(json.dumps(event)) for event in events]
        if repr(again) != repr(events):
            raise Different(f"{events!r:.300} became {again!r:.300}")
        return True


class PolicyFiles:
    """Shipped policy files, weights and description, with a valid hash of the weights."""

    name = "policy-files"

    def __init__(self, folder: Path) -> None:
        folders = [Path(dynamix.__file__).parent / "policies", Path(papers.__file__).parent]
        shipped = sorted(file for folder in folders for file in folder.glob("pretrained/*.safetensors"))
        self.files = [(file.read_bytes(), json.loads(file.with_suffix(".json").read_text())) for file in shipped]
        self.path = folder / "policy.safetensors"

    def attempt(self, rng: random.Random) -> bool:
        data, about = rng.choice(self.files)
        how = rng.random()
        if how < 0.5:
            header = int.from_bytes(data[:8], "little") + 8
            data = mutations.raw(data[:header], rng) + data[header:] if rng.random() < 0.7 else mutations.raw(data, rng)
            about = {**about, "sha256": hashlib.sha256(data).hexdigest()}
            text = json.dumps(about)
        elif how < 0.8:
            try:
                text = json.dumps(mutations.value(about, rng), default=str)
            except (ValueError, TypeError, RecursionError):
                text = "[" * 5000
        else:
            text = mutations.text(json.dumps(about), rng)
        self.path.write_bytes(data)
        self.path.with_suffix(".json").write_bytes(text.encode("utf-8", errors="surrogatepass"))
        try:
            policy = make_policy(str(self.path))
        except DynamixError:
            return False
        if rng.random() < 0.02:
            policy.decide(Window.of([8, 8], compute=[0.1, 0.2], wait=0.0, communication=0.1), dynamix.Bounds.of(2))
        return True


class Scenarios:
    """Scenarios as YAML texts; changes include aliases and depth."""

    name = "scenarios"

    def __init__(self, folder: Path) -> None:
        root = Path(emulator.__file__).parent
        found = {path.stem: path for path in root.rglob("*.yaml")}
        self.texts = [found[name].read_text() for name in shipped_scenarios() if name in found]
        self.texts += ["x: &a [1,1,1,1,1,1,1,1,1]\n" + "".join(f"{c}: &{c} [{'*a,' * 9}]\n" for c in "bcdefgh")]
        self.file = folder / "scenario.yaml"

    def attempt(self, rng: random.Random) -> bool:
        text = rng.choice(self.texts)
        if rng.random() < 0.02:
            text += "x: " + "[" * rng.choice((10, 100, 3000))
        self.file.write_bytes(mutations.text(text, rng).encode("utf-8", errors="surrogatepass"))
        try:
            scenario = load_scenario(self.file)
        except DynamixError:
            return False
        if load_scenario(scenario.model_dump()) != scenario:
            raise Different(repr(scenario)[:300])
        return True


class Traces:
    """Traces of slowdowns as CSV texts."""

    name = "traces"

    def __init__(self, folder: Path) -> None:
        self.text = "time_s,host0,host1\n# comment\n0,1.0,0.8\n12.5,1.0,0.35\n20,0.05,1\n"
        self.file = folder / "trace.csv"

    def attempt(self, rng: random.Random) -> bool:
        text = mutations.text(self.text, rng)
        try:
            if rng.random() < 0.1:
                self.file.write_bytes(text.encode("utf-8", errors="surrogatepass"))
                read_trace(self.file)
            times, factors = parse_trace(text, "trace.csv")
        except DynamixError:
            return False
        lines = [",".join(map(repr, (t, *row))) for t, row in zip(times, factors, strict=True)]
        names = ",".join(f"h{i}" for i in range(len(factors[0])))
        if parse_trace(f"time_s,{names}\n" + "\n".join(lines) + "\n", "again.csv") != (times, factors):
            raise Different(text)
        return True


def targets(folder: Path) -> dict[str, Callable[[], Target]]:
    """Kind -> a function that makes its target; `folder` is for its files."""
    of_files: Iterable[Any] = (Events, PolicyFiles, Scenarios, Traces)
    frames = (Handshakes, WorkersMessages, AggregatorsMessages)
    made: dict[str, Callable[[], Target]] = {kind.name: kind for kind in (States, *frames)}
    return made | {kind.name: lambda kind=kind: kind(folder) for kind in of_files}
