"""The parts that a rank of any peer needs: the task, a line to the parent, a board that all ranks share, and the
measured run.

torch, NumPy and the standard library only, and relative imports: this folder runs as a package of its own in the
peer's interpreter. Layers and the name of the loss come from the parent as JSON, weights and data set in files.
"""

from __future__ import annotations

import json
import os
import select
import socket
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import Dataset

START_TIMEOUT_S = 240.0
_POLL_S = 0.002


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """Inputs and targets in memory. A loader fetches a batch by one index: collating one by one would cost a slow host
    more than training does."""

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        chosen = torch.as_tensor(indices)
        return self.inputs[chosen], self.targets[chosen]


def as_is(batch: Any) -> Any:
    """`collate_fn` for `Samples`, whose batches are complete already."""
    return batch


def built(layers: Sequence[Any]) -> nn.Module:
    """A network of torch's own layers from what the parent read off its own: the class's name and its arguments, or, of
    a sequence, such pairs.
    """
    name, given = layers
    if name == nn.Sequential.__name__:
        return nn.Sequential(*(built(layer) for layer in given))
    made: nn.Module = getattr(nn, name)(**given)
    return made


class Task:
    """The task: what is trained and how, from the file that the parent wrote.

    total   global batch of the run, samples; `share` is one rank's equal part of it
    line    to the parent, on rank 0
    """

    def __init__(self, path: str) -> None:
        torch.set_num_threads(1)
        self.config: dict[str, Any] = json.loads(Path(path).read_text())
        self.rank, self.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.name, self.seed = str(self.config["name"]), int(self.config["seed"])
        self.total = int(self.config["global_batch"])
        self.settings: dict[str, Any] = self.config["settings"]
        self.line = Line(self.config["socket"]) if self.rank == 0 else None
        with np.load(self.config["data"]) as saved:
            self.data = Samples(torch.from_numpy(saved["inputs"]), torch.from_numpy(saved["targets"]))

    @property
    def share(self) -> int:
        return self.total // self.world_size

    def address(self) -> str:
        """This host's address towards rank 0; nothing is sent."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((os.environ["MASTER_ADDR"], 9))
            return str(probe.getsockname()[0])

    def announce(self, text: str) -> None:
        """Rank 0 tells the others where they meet."""
        meeting = Path(self.config["meeting"])
        unfinished = meeting.with_suffix(".unfinished")
        unfinished.write_text(text)
        unfinished.replace(meeting)

    def announced(self) -> str:
        """The word of rank 0, once it has come."""
        meeting, deadline = Path(self.config["meeting"]), time.monotonic() + START_TIMEOUT_S
        while not meeting.exists():
            if time.monotonic() > deadline:
                sys.exit("rank 0 gave no address")
            time.sleep(0.05)
        return meeting.read_text()

    def model(self) -> nn.Module:
        """The network with the weights every run of this seed begins with."""
        with torch.random.fork_rng(devices=[]):
            net = built(self.config["layers"])
        net.load_state_dict(torch.load(self.config["weights"], weights_only=True))
        return net

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The workload's, a mean over the samples."""
        return getattr(F, self.config["loss"])(outputs, targets)  # type: ignore[no-any-return]

    def optimizer(self, parameters: Iterable[Any]) -> SGD:
        return SGD(parameters, lr=self.config["learning_rate"], momentum=self.config["momentum"])

    def warm_up(self, wrap: Callable[[nn.Module], nn.Module] = lambda model: model) -> None:
        """Steps on a model that is thrown away, so that first calls and allocations are not on the clock."""
        model = wrap(self.model())
        optimizer = self.optimizer(model.parameters())
        inputs, targets = self.data.__getitems__(range(self.share))
        for _ in range(self.config["warm_up_steps"]):
            self.loss(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()


class Line:
    """JSON messages, one a line, with the parent: a Unix socket, which no network namespace hides."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(path)
        self._buffer = b""

    def send(self, kind: str, **fields: Any) -> None:
        self._socket.sendall(json.dumps({"kind": kind, **fields}).encode() + b"\n")

    def receive(self, timeout_s: float | None = None) -> str | None:
        """The kind of the next message, None after `timeout_s`; ends the process when the parent is gone."""
        while b"\n" not in self._buffer:
            if not select.select([self._socket], [], [], timeout_s)[0]:
                return None
            chunk = self._socket.recv(65536)
            if not chunk:
                sys.exit("the parent has ended")
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return str(json.loads(line)["kind"])

    def ask(self, kind: str, **fields: Any) -> None:
        """Send and wait for "go"; a stop that came too late for its run is thrown away."""
        self.send(kind, **fields)
        while self.receive() != "go":
            pass


class Board:
    """A few numbers in a file that all ranks map. Emulated hosts share one machine's files, so that meeting and
    stopping work for peers without a process group, and cost no network."""

    def __init__(self, path: str, rank: int, world_size: int) -> None:
        self.rank = rank
        numbers = np.memmap(path, dtype=np.int64, mode="r+", shape=(1 + 2 * world_size,))
        self._stop, self._arrivals, self.samples = numbers[:1], numbers[1 : 1 + world_size], numbers[1 + world_size :]

    def meet(self) -> None:
        """Until all ranks are here."""
        self._arrivals[self.rank] += 1
        here, deadline = int(self._arrivals[self.rank]), time.monotonic() + START_TIMEOUT_S
        while int(self._arrivals.min()) < here:
            if time.monotonic() > deadline:
                sys.exit(f"not all ranks came within {START_TIMEOUT_S:.0f} s")
            time.sleep(_POLL_S)

    def add(self, samples: int) -> int:
        """Count what this rank has used; returns what all have."""
        self.samples[self.rank] += samples
        return int(self.samples.sum())

    @property
    def stop_at(self) -> int:
        """The step after which all ranks end; 0 while nobody knows."""
        return int(self._stop[0])

    @stop_at.setter
    def stop_at(self, step: int) -> None:
        self._stop[0] = step


class Run:
    """The measured part: its clock, progress, snapshots every so many samples, and the end.

    in_step       ranks meet, so that all must end at the same step. Rank 0 writes after a meeting that the next one is
                  the last; nobody can be done with that one before rank 0 has come to it, so all see it.
    meets_every   so many steps are between meetings; snapshots are of weights that have just met
    """

    def __init__(self, task: Task, model: nn.Module, *, in_step: bool = True, meets_every: int = 1) -> None:
        self.task, self.model, self.in_step, self.meets_every = task, model, in_step, meets_every
        config = task.config
        self.board = Board(config["board"], task.rank, task.world_size)
        self.line = task.line
        self.every = int(config["snapshot_samples"])
        self.limit = -(-int(config["max_steps"]) // meets_every) * meets_every
        self.ends: list[float] = []
        self.meetings_s: list[float] = []
        self.sizes: list[tuple[float, list[int]]] = []
        self.samples, self._next, self._said_s, self._began = 0, self.every, 0.0, 0.0

    def begin(self) -> None:
        """All ranks meet, the parent puts the hosts' limits in force, and the clock starts."""
        self.board.meet()
        if self.line is not None:
            self.line.ask("start", run=self.task.name)
        self.board.meet()
        self._began = time.perf_counter()

    def goes_on(self, samples: int, loss: float, sizes: list[int], *, stepped: bool = True) -> bool:
        """After every step. samples: of all ranks so far; sizes: of each rank's part of the global batch; stepped: the
        weights changed. False ends the run."""
        now = self.clock()
        if stepped:
            self.ends.append(now)
        step, self.samples = len(self.ends), samples
        if self.line is not None:
            self._tell(self.line, now, step, loss, sizes)
            met = step % self.meets_every == 0
            if stepped and met and (samples >= self._next or step >= self.limit):
                self._snapshot(self.line, now, step)
            if met and not self.board.stop_at and (step >= self.limit or self.line.receive(0) == "stop"):
                self.board.stop_at = step + self.meets_every if self.in_step else 1
        if self.in_step:
            return step < self.limit and not 0 < self.board.stop_at <= step
        return self.board.stop_at == 0

    def met(self, took_s: float) -> None:
        """Rank 0 has met the others, which took it so long, waiting for them included."""
        self.meetings_s.append(round(took_s, 4))

    def clock(self) -> float:
        """Seconds since the run began; 0 before that."""
        return time.perf_counter() - self._began if self._began else 0.0

    def finish(self, *, overhead_s: float = 0.0) -> None:
        """Report and end the process at once: what a peer would still clean up is of no use to anybody."""
        if self.line is not None:
            about = {"batch_sizes": self.sizes, "meetings_s": self.meetings_s}
            Path(self.task.config["about"]).write_text(json.dumps(about))
            self.line.ask(
                "finished", run=self.task.name, time_s=self.ends[-1] if self.ends else 0.0, samples=self.samples,
                batch_sizes=self.sizes[-1][1] if self.sizes else [], step_ends_s=self.ends, overhead_s=overhead_s,
                events=self.task.config["events"],
            )  # fmt: skip
            self.line.send("done")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    def _tell(self, line: Line, now: float, step: int, loss: float, sizes: list[int]) -> None:
        if not self.sizes or self.sizes[-1][1] != sizes:
            self.sizes.append((round(now, 3), sizes))
        if step % 5 == 0 or now - self._said_s > 1.0:
            self._said_s = now
            line.send("progress", time_s=now, step=step, samples=self.samples, loss=loss, batch_sizes=sizes)

    def _snapshot(self, line: Line, now: float, step: int) -> None:
        while self._next <= self.samples:
            self._next += self.every
        path = Path(self.task.config["snapshots"]) / f"{step}.f32"
        with torch.no_grad():
            torch.cat([p.reshape(-1) for p in self.model.parameters()]).numpy().tofile(path)
        line.send("snapshot", time_s=now, step=step, samples=self.samples, path=str(path))
