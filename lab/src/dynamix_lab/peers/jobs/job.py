"""The parts that a rank of any peer needs: the task, a connection to the parent, numbers shared by all ranks, and the
measured run.

It uses only torch, NumPy and the standard library, and relative imports, because this folder runs as a package of its
own in the peer's interpreter. Layers and the loss's name come from the parent as JSON, weights and data set in files.
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
    """Inputs and targets in memory. A loader fetches a batch by one index, because collating single samples would cost
    a slow host more than training."""

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
    """`collate_fn` for `Samples`, whose batches are already complete."""
    return batch


def built(layers: Sequence[Any]) -> nn.Module:
    """Make a network of torch's own layers from the parent's description: a class name and its arguments, or for a
    sequence a list of such pairs.
    """
    name, given = layers
    if name == nn.Sequential.__name__:
        return nn.Sequential(*(built(layer) for layer in given))
    made: nn.Module = getattr(nn, name)(**given)
    return made


class Task:
    """What is trained and how, from the file that the parent wrote.

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
        """This host's address towards rank 0. Sends nothing."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((os.environ["MASTER_ADDR"], 9))
            return str(probe.getsockname()[0])

    def announce(self, text: str) -> None:
        """Rank 0 publishes the address at which the ranks connect."""
        meeting = Path(self.config["meeting"])
        unfinished = meeting.with_suffix(".unfinished")
        unfinished.write_text(text)
        unfinished.replace(meeting)

    def announced(self) -> str:
        """Wait for the text that rank 0 publishes."""
        meeting, deadline = Path(self.config["meeting"]), time.monotonic() + START_TIMEOUT_S
        while not meeting.exists():
            if time.monotonic() > deadline:
                sys.exit("rank 0 gave no address")
            time.sleep(0.05)
        return meeting.read_text()

    def model(self) -> nn.Module:
        """The network with the initial weights of this seed."""
        with torch.random.fork_rng(devices=[]):
            net = built(self.config["layers"])
        net.load_state_dict(torch.load(self.config["weights"], weights_only=True))
        return net

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The workload's loss, a mean over the samples."""
        return getattr(F, self.config["loss"])(outputs, targets)  # type: ignore[no-any-return]

    def optimizer(self, parameters: Iterable[Any]) -> SGD:
        return SGD(parameters, lr=self.config["learning_rate"], momentum=self.config["momentum"])

    def warm_up(self, wrap: Callable[[nn.Module], nn.Module] = lambda model: model) -> None:
        """Train a model that is discarded, so that first calls and allocations are not on the clock."""
        model = wrap(self.model())
        optimizer = self.optimizer(model.parameters())
        inputs, targets = self.data.__getitems__(range(self.share))
        for _ in range(self.config["warm_up_steps"]):
            self.loss(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()


class Line:
    """JSON messages to and from the parent, one per line: a Unix socket, which works across network namespaces."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(path)
        self._buffer = b""

    def send(self, kind: str, **fields: Any) -> None:
        self._socket.sendall(json.dumps({"kind": kind, **fields}).encode() + b"\n")

    def receive(self, timeout_s: float | None = None) -> str | None:
        """The kind of the next message, None after `timeout_s`. Ends the process if the parent has ended."""
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
        """Send a message and wait for "go". A stop that came too late for its run is ignored."""
        self.send(kind, **fields)
        while self.receive() != "go":
            pass


class Board:
    """A few numbers in a file that all ranks map. Emulated hosts share one machine's files, so peers without a process
    group can wait for each other and stop together, and it costs no network."""

    def __init__(self, path: str, rank: int, world_size: int) -> None:
        self.rank = rank
        numbers = np.memmap(path, dtype=np.int64, mode="r+", shape=(1 + 2 * world_size,))
        self._stop, self._arrivals, self.samples = numbers[:1], numbers[1 : 1 + world_size], numbers[1 + world_size :]

    def meet(self) -> None:
        """Wait until all ranks are here."""
        self._arrivals[self.rank] += 1
        here, deadline = int(self._arrivals[self.rank]), time.monotonic() + START_TIMEOUT_S
        while int(self._arrivals.min()) < here:
            if time.monotonic() > deadline:
                sys.exit(f"not all ranks came within {START_TIMEOUT_S:.0f} s")
            time.sleep(_POLL_S)

    def add(self, samples: int) -> int:
        """Add the samples that this rank has used. Returns those of all ranks."""
        self.samples[self.rank] += samples
        return int(self.samples.sum())

    @property
    def stop_at(self) -> int:
        """The step after which all ranks end; 0 while it is undecided."""
        return int(self._stop[0])

    @stop_at.setter
    def stop_at(self, step: int) -> None:
        self._stop[0] = step


class Run:
    """The measured part: its clock, progress, snapshots at intervals of samples, and the end.

    in_step       ranks synchronise, so all must end at the same step. Rank 0 announces after a synchronisation that the
                  next one is the last. No rank can finish that one before rank 0 has reached it, so all see it.
    meets_every   steps between synchronisations; snapshots are taken of weights just synchronised
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
        """Wait for all ranks; then the parent puts the hosts' limits in force, and the clock starts."""
        self.board.meet()
        if self.line is not None:
            self.line.ask("start", run=self.task.name)
        self.board.meet()
        self._began = time.perf_counter()

    def goes_on(self, samples: int, loss: float, sizes: list[int], *, stepped: bool = True) -> bool:
        """Call after every step. samples: of all ranks so far; sizes: each rank's part of the global batch; stepped:
        whether the weights changed. Returns False to end the run."""
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
        """Record a synchronisation on rank 0, which took this long, including waiting for the others."""
        self.meetings_s.append(round(took_s, 4))

    def clock(self) -> float:
        """Seconds since the run began; 0 before that."""
        return time.perf_counter() - self._began if self._began else 0.0

    def finish(self, *, overhead_s: float = 0.0) -> None:
        """Report and end the process at once, without the peer's own clean-up, which is not needed."""
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
