"""One rank of `dynamix bench compression`: trains one model by each way in turn, and measures. `python -m ...
CONFIG.json`.

All ways share the process. Those that differ by their hook share a model and DDP, whose one hook calls the hook of the
way whose turn it is. Each has its own weights, optimizer and memory, and gets the same batches in its timed steps. One
bucket holds the whole gradient, so that an exchange has a single time. Ways with sparse tensors, and plain DDP, have
their own models. If a job has `keep`, top-k with error feedback precedes the hook of every way except plain DDP, also
of dense: all exchange the same gradient, and selecting is no part of the exchange's time.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer

from dynamix_homomorphic.lossy import LossyState
from dynamix_lab.statistics import balanced_order
from dynamix_lab.suites.compression.exchanges import BUCKETS_MB, PLAIN, SPARSE_TENSORS, GradientExchange, make_exchange
from dynamix_lab.suites.compression.jobs import make_job

MEASURING = ("auto", "gather-sparse")  # ways that first measure and choose
ONE_BUCKET_MB = 4096
UNTIMED = 1_000_000  # batch numbers from here on are for warming up
LAYOUT_STEPS = 2  # DDP rebuilds its buckets after the first
FIRST_STEPS = 3  # untimed in a way's first turn: one-phase's first union
AUTO_STEPS = 20  # for auto, which measures before it settles
MOST_STEPS = 100  # timed in one turn


@dataclass
class Trained:
    """A model under DDP. `hooked`: its hook calls that of the way whose turn it is."""

    net: nn.Module
    model: DDP
    parameters: list[nn.Parameter]
    hooked: bool


@dataclass
class Entrant:
    """One way, with its own weights and optimizer."""

    exchange: GradientExchange
    trained: Trained
    weights: list[Tensor]
    optimizer: Optimizer
    selection: LossyState | None
    untimed: int = 0
    turns: list[dict[str, Any]] = field(default_factory=list)


class Rank:
    """This rank's part of one cell."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config, self.seed = config, int(config["seed"])
        self.rank, self.workers = dist.get_rank(), dist.get_world_size()
        self.job = make_job(config["job"], self.seed, workers=self.workers, **config["options"])
        self._began = self._exchange_s = 0.0
        self._models: dict[tuple[bool, float, bool], Trained] = {}
        timeout = timedelta(seconds=config["timeout_s"])
        self.entrants = {}
        for name in config["ways"]:
            trained = self._model_for(name)
            aggregator = config.get("aggregators", {}).get(name)
            exchange = make_exchange(
                name, trained.net, by_row=self.job.keep is None, timeout=timeout, aggregator=aggregator
            )
            self.entrants[name] = self._entrant(exchange, trained)

    def run(self) -> dict[str, Any]:
        """Run all turns of all ways. Returns this rank's measurements."""
        names, rounds = list(self.entrants), int(self.config["rounds"])
        for number in range(rounds):
            for name in balanced_order(names, self.seed * len(names) + number):
                self._turn(self.entrants[name])
                if self.rank == 0:
                    print(f"{number} {name}", flush=True)  # the parent counts the lines
        return {
            "dense_bytes": sum(p.nbytes for p in next(iter(self.entrants.values())).trained.parameters),
            "ways": {
                name: {
                    "turns": e.turns,
                    "statistics": None if e.exchange.statistics is None else e.exchange.statistics.as_dict(),
                    "chosen": e.exchange.ways(),
                }
                for name, e in self.entrants.items()
            },
        }

    def _entrant(self, exchange: GradientExchange, trained: Trained) -> Entrant:
        weights = [p.detach().clone() for p in trained.parameters]
        selection = None if self.job.keep is None else LossyState(trained.net, keep=self.job.keep)
        return Entrant(exchange, trained, weights, self.job.make_optimizer(trained.parameters), selection)

    def _model_for(self, name: str) -> Trained:
        """The model that a way trains, with buckets laid out and initial weights restored."""
        sparse, plain = name in SPARSE_TENSORS, name in PLAIN
        key = (sparse, BUCKETS_MB.get(name, ONE_BUCKET_MB), plain)
        if key in self._models:
            return self._models[key]
        make = self.job.make_sparse if sparse and self.job.make_sparse is not None else self.job.make_model
        net = make(self.seed)
        # Every rank makes the same weights from the seed, so none are sent over a slow link.
        model = DDP(net, bucket_cap_mb=key[1], init_sync=False)
        trained = self._models[key] = Trained(net, model, trained_of(net), not plain)
        self.current = self._entrant(make_exchange("dense", net), trained)
        if trained.hooked:
            self._register(model)
        for _ in range(LAYOUT_STEPS):
            self._step(self.current)
        with torch.no_grad():
            for p, fresh in zip(trained.parameters, trained_of(make(self.seed)), strict=True):
                p.copy_(fresh)
        return trained

    def _register(self, model: DDP) -> None:
        def hook(state: Any, bucket: Any) -> Future[Tensor]:
            exchange, selection = self.current.exchange, self.current.selection
            held = [] if selection is None else selection.sparsify_(bucket)[1]
            began = self._began = self._began or time.perf_counter()  # with several buckets: the first

            def done(reduced: Future[Any]) -> Tensor:
                value: Tensor = reduced.value()
                self._exchange_s = time.perf_counter() - began
                return value if selection is None else selection.settle(value, held)

            passed_on: Future[Tensor] = exchange.hook(exchange.state, bucket).then(done)
            return passed_on

        hook.__annotations__.clear()
        model.register_comm_hook(None, hook)

    def _turn(self, entrant: Entrant) -> None:
        with torch.no_grad():
            for p, own in zip(entrant.trained.parameters, entrant.weights, strict=True):
                p.copy_(own)
        self.current = entrant
        losses = [self._step(entrant)["loss"] for _ in range(self._untimed(entrant))]
        statistics = entrant.exchange.statistics
        dist.barrier()
        before, paid = traffic(), statistics.payload_bytes if statistics else 0
        first = len(entrant.turns) * max(self.config["steps"], MOST_STEPS)  # the same batches for every way in a round
        timed = [self._step(entrant, first + step) for step in range(self.config["steps"])]
        timed += [self._step(entrant, first + step) for step in range(len(timed), self._steps_for(timed))]
        dist.barrier()
        after = traffic()
        bound, nonzero = bound_bytes(entrant.trained.net, by_row=entrant.exchange.by_row)
        entrant.turns.append(
            {
                "iteration_s": [step["iteration_s"] for step in timed],
                "exchange_s": [step["exchange_s"] for step in timed] if entrant.trained.hooked else None,
                "loss": losses + [step["loss"] for step in timed],
                "sent": None if before is None or after is None else after[1] - before[1],
                "received": None if before is None or after is None else after[0] - before[0],
                "payload": statistics.payload_bytes - paid if statistics else None,
                "bound": bound,
                "nonzero": nonzero,
            }
        )
        entrant.weights = [p.detach().clone() for p in entrant.trained.parameters]

    def _steps_for(self, timed: list[dict[str, float]]) -> int:
        """How many steps a turn needs to last `turn_s`, given the times so far. Rank 0 decides for all."""
        if not self.config["turn_s"]:
            return len(timed)
        each = min(step["iteration_s"] for step in timed)
        count = torch.tensor(min(math.ceil(self.config["turn_s"] / each), MOST_STEPS))
        dist.broadcast(count, 0)
        return int(count)

    def _untimed(self, entrant: Entrant) -> int:
        if not self.config["warm_up"]:
            return 0
        if entrant.turns:
            return 1
        return AUTO_STEPS if entrant.exchange.name in MEASURING else FIRST_STEPS

    def _step(self, entrant: Entrant, number: int | None = None) -> dict[str, float]:
        """One step, on the batch with this number; None: on a batch that no timed step uses."""
        if number is None:
            number, entrant.untimed = UNTIMED + entrant.untimed, entrant.untimed + 1
        inputs, targets = self.job.batch(number * self.workers + self.rank)
        self._began = self._exchange_s = 0.0
        began = time.perf_counter()
        entrant.optimizer.zero_grad()
        loss = self.job.loss(entrant.trained.model(inputs), targets)
        loss.backward()
        entrant.optimizer.step()
        took = time.perf_counter() - began
        return {"iteration_s": took, "exchange_s": self._exchange_s, "loss": float(loss.detach())}


def trained_of(net: nn.Module) -> list[nn.Parameter]:
    """Its parameters, without frozen ones, which are not exchanged."""
    return [p for p in net.parameters() if p.requires_grad]


def traffic() -> tuple[int, int] | None:
    """Bytes (received, sent) so far on the interface that gloo uses; None on loopback, which others use as well.

    /proc/net shows the process's own network namespace, /sys does not.
    """
    name = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    if name == "lo":
        return None
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        interface, _, counters = line.partition(":")
        if interface.strip() == name:
            fields = counters.split()
            return int(fields[0]), int(fields[8])
    return None


def bound_bytes(net: nn.Module, *, by_row: bool) -> tuple[float, float]:
    """The least bytes of a lossless exchange of the present gradients of `net`: index entropy plus four bytes a value.

    by_row   an embedding's row is one item, else every element is one. Returns bytes, and the fraction of elements in
             nonzero items.
    """
    sent = elements = total = 0.0
    for items, live, width in _segments(net, by_row):
        p = live / items
        entropy = -sum(q * math.log2(q) for q in (p, 1 - p) if q > 0)
        total += (items * entropy + 32 * live * width) / 8
        sent, elements = sent + live * width, elements + items * width
    return total, sent / elements


def _segments(net: nn.Module, by_row: bool) -> Iterator[tuple[int, int, int]]:
    """(items, nonzero items, elements an item): each embedding by itself, everything else together."""
    tables = {id(m.weight) for m in net.modules() if isinstance(m, nn.Embedding)} if by_row else set()
    items = live = 0
    for p in net.parameters():
        if p.grad is None:
            continue
        if id(p) in tables:
            yield p.shape[0], int(p.grad.to_dense().any(1).sum()), p.shape[1]
        else:
            items, live = items + p.numel(), live + int(torch.count_nonzero(p.grad.to_dense()))
    if items:
        yield items, live, 1


def main(path: str) -> None:
    """Run one cell on this rank."""
    config = json.loads(Path(path).read_text())
    if os.environ["RANK"] == os.environ["WORLD_SIZE"]:
        return  # the host of an aggregator, which has no rank
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=config["timeout_s"]))
    try:
        found = Rank(config).run()
        out = Path(config["out"]) / f"measured{dist.get_rank()}.json"
        out.write_text(json.dumps(found))
        dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
