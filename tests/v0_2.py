"""The jobs whose states of version 0.2 lie in tests/fixtures/v0_2: one table, and the loop that trains any of them.

`tests/fixtures/make.py` wrote the states with the code of 0.2; `tests/test_v0_2.py` goes on from them with today's.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

import dynamix

FIXTURES = Path(__file__).parent / "fixtures" / "v0_2"
SAMPLES, BATCH = 144, 4


@dataclass(frozen=True)
class Case:
    """One kind of job, and what becomes of its state.

    options    of `Controller`; `wrap` those of its method
    order      how samples come: "order", "lengths", "padded", "contiguous" or "stream"
    hook       a communication hook by name; see `_hook`
    saves      "first": rank 0's state is all there is; "each": every rank's own; "gather": `state_dict(gather=True)`
    refused    what today's code says, for a job that holds something that was removed; None: the state loads
    state      the case whose state it is, for a job of today that goes on from a job of other options; None: its own
    """

    name: str
    policy: str = "lb_bsp"
    workers: int = 2
    options: Mapping[str, Any] = field(default_factory=dict)
    wrap: Mapping[str, Any] = field(default_factory=dict)
    order: str = "order"
    model: str = "ddp"
    optimizer: str = "sgd"
    hook: str | None = None
    saves: str = "first"
    rounds: int = 14  # before the state is saved; an epoch has 18 of two workers, 12 of three
    refused: str | None = None
    state: str | None = None


ADAPTIVE = {"global_batch": "adaptive", "min_global_batch": 1}  # in 0.2 it might fall below its start
PIECES = {"batch_size": 8, "micro_batch": 2}
APART = {**PIECES, "meet": "parameters"}

CASES = (
    Case("static", "static"),
    Case("static-size", "static:6"),
    Case("dbs", "dbs", rounds=22),  # decides once an epoch
    Case("lb_bsp"),
    Case("goodput", "goodput"),
    Case("goodput-adaptive", "goodput", options=ADAPTIVE, saves="each"),
    Case("dynamix", "dynamix"),
    Case("dynamix-adaptive", "dynamix", options=ADAPTIVE, workers=3, saves="each"),
    Case("dynamix-unguarded", "dynamix", options={"guard": False}),
    Case("guarded-lb_bsp", "guarded:lb_bsp"),
    Case("guarded-goodput", "goodput", options={"guard": True}, workers=3),
    Case("stigmergic", "stigmergic", saves="each"),
    Case("stigmergic-adaptive", "stigmergic", options=ADAPTIVE, workers=3, saves="each"),
    Case("stigmergic-gathered", "stigmergic", saves="gather"),
    Case("dynamix-paper", "dynamix-paper"),
    Case("noise_scale", "noise_scale", options=ADAPTIVE),
    Case("pollux", "pollux", options=ADAPTIVE),
    Case("cannikin", "cannikin", options=ADAPTIVE),
    Case("own-file", str(FIXTURES / "policies" / "own.safetensors")),
    Case("learning", "dynamix", options={"learn": True}, refused="removed in 0.3: write no learn="),
    Case("no-longer-learning", "dynamix", state="learning", refused="learn"),
    Case(
        "learning-name",
        "guarded:learning:dynamix-paper",
        refused="removed in 0.3: write policy='guarded:dynamix-paper'",
    ),
    Case("accumulate", options={"accumulate": 3}, saves="each"),
    Case("pieces", options=PIECES, saves="each"),
    Case("pieces-adaptive", "goodput", options={**PIECES, **ADAPTIVE}, workers=3),
    Case("apart-sgd", options=APART, saves="each"),
    Case("apart-adamw", options=APART, optimizer="adamw", saves="each"),
    Case("apart-kept", options=APART, optimizer="adamw", wrap={"optimizer_state": "kept"}, saves="each"),
    Case("apart-adaptive", "goodput", options={**APART, **ADAPTIVE}),
    Case("apart-outer", options=APART, wrap={"outer": True}),
    Case(
        "apart-overlap",
        options=APART,
        wrap={"overlap": True},
        saves="each",
        refused="removed in 0.3: write Averaging(wire=",
    ),
    Case("apart-bfloat16", options=APART, wrap={"wire": "bfloat16"}),
    Case(
        "apart-normalized",
        options=APART,
        wrap={"steps": "normalized"},
        refused="removed in 0.3: write Averaging() without steps",
    ),
    Case("apart-float16", options=APART, wrap={"wire": "float16"}, refused="removed in 0.3: write Averaging(wire="),
    Case("apart-early", options=APART, wrap={"early": True}, refused="removed in 0.3: write Averaging() without early"),
    Case(
        "apart-sparse", options=APART, wrap={"sparse": True}, refused="removed in 0.3: write Averaging() without sparse"
    ),
    *[
        Case(f"no-longer-{option}", options=APART, state=f"apart-{option}", saves=saves)
        for option, saves in (
            ("overlap", "each"),
            ("normalized", "first"),
            ("float16", "first"),
            ("early", "first"),
            ("sparse", "first"),
        )
    ],
    Case("auto", "goodput", options={"meet": "auto"}, saves="each"),
    Case("auto-gradients", "goodput", options={"meet": "auto"}, rounds=4),  # has not tried to step apart yet
    Case("auto-adaptive", "dynamix", options={"meet": "auto", **ADAPTIVE}, workers=3, optimizer="adamw", saves="each"),
    Case("stream", order="stream", saves="each"),
    Case("lengths", "goodput", order="lengths", saves="each"),
    Case("padded", order="padded"),
    Case("contiguous", order="contiguous", rounds=22, saves="each"),
    Case("fsdp2", model="fsdp2", saves="each"),
    Case("fsdp2-adamw", "goodput", model="fsdp2", optimizer="adamw", workers=3, options=PIECES),
    Case("compressed-auto", hook="auto"),
    Case("compressed-gather", hook="gather", workers=3),
    Case("compressed-compaction", hook="compaction"),
    Case("compressed-lhc", hook="lhc"),
    Case("lossy", hook="lossy", saves="each"),
    Case("bounded", hook="bounded", refused="removed in 0.3: write nothing in place of BoundedState"),
    Case("interval-auto", "goodput", options={"interval": "auto"}),
    Case("quantum", options={"quantum": 2, "max_change": 1.5, "min_batch_size": 2}),
    Case("adascale", "goodput", options={**ADAPTIVE, "lr_rule": "adascale"}),
    Case("gathered", saves="gather", workers=3),
    Case("loss-side", wrap={"weighting": "loss"}),
    Case("schedule", "goodput", options=ADAPTIVE, optimizer="adamw", wrap={"schedule": True}),
    Case("alone", "goodput", options=ADAPTIVE, workers=1, model="plain"),
    Case("alone-dynamix", "dynamix", options=ADAPTIVE, workers=1, model="plain"),
)


def _hook(name: str | None, net: nn.Module) -> dict[str, Any]:
    """What `Controller.wrap` gets for it."""
    if name is None:
        return {}
    from dynamix.compression import CompressionState, compression_hook

    if name == "bounded":
        from dynamix.compression.bounded import BoundedState, bounded_hook

        return {"hook": bounded_hook, "hook_state": BoundedState(0.01)}
    if name == "lossy":
        from dynamix_homomorphic import LossyState, lossy_topk_hook

        return {"hook": lossy_topk_hook, "hook_state": LossyState(net, keep=0.25)}
    return {"hook": compression_hook, "hook_state": CompressionState(name, min_bytes=0, seed=1)}  # type: ignore


class Job:
    """One rank of a case: its controller, model, optimizer and the indices that it trained on in this epoch."""

    def __init__(self, case: Case, rank: int, *, events: Path | None = None) -> None:
        self.case, self.rank, self.epoch, self.trained = case, rank, 0, list[int]()
        torch.manual_seed(3)
        self.x = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(2))
        self.net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))
        options: dict[str, Any] = {"batch_size": BATCH, "interval": 2, **case.options}
        if case.order == "contiguous":
            options.pop("interval")
        self.accumulate = options.get("accumulate", 1)
        self.controller = dynamix.Controller(case.policy, events=events, **options)
        self.batches = self._batches()
        self._wrap()

    def _batches(self) -> Any:
        controller, order, everything = self.controller, self.case.order, range(SAMPLES)
        if order == "stream":
            self.source: Any = controller.stream(everything)
            return self.source
        cost = [1 + i % 7 for i in everything]
        how: Any = {
            "lengths": {"lengths": cost},
            "padded": {"lengths": cost, "padded": True},
            "contiguous": {"partition": "contiguous"},
        }.get(order, {})
        self.source = controller.batch_sampler(everything, seed=1, **how)
        return DataLoader(everything, batch_sampler=self.source)  # type: ignore[arg-type]

    def _wrap(self) -> None:
        net, wrap = self.net, dict(self.case.wrap)
        if self.case.model == "fsdp2":
            from torch.distributed.fsdp import fully_shard

            self.model: Any = fully_shard(net)
        else:
            self.model = DDP(net) if self.case.model == "ddp" else net
        kinds: dict[str, Any] = {"sgd": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9), "adamw": torch.optim.AdamW}
        self.optimizer = kinds[self.case.optimizer](self.model.parameters())
        scheduled, weighting = wrap.pop("schedule", False), wrap.pop("weighting", "hook")
        self.loss_side = weighting == "loss"
        if wrap.pop("outer", False):
            wrap["outer"] = lambda parameters: torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)
        given: dict[str, Any] = {"averaging": dynamix.Averaging(**wrap)} if wrap else {}
        self.controller.wrap(self.model, self.optimizer, weighting=weighting, **given, **_hook(self.case.hook, net))
        if scheduled:
            self.controller.scheduler(torch.optim.lr_scheduler.StepLR(self.optimizer, 4))

    def train(self, rounds: int | None = None) -> None:
        """So many rounds; None: to the end of the epoch."""
        while rounds is None or rounds > 0:
            self.source.set_epoch(self.epoch)
            with contextlib.closing(self._epoch()) as steps:
                for met in steps:
                    rounds = rounds if rounds is None else rounds - met
                    if rounds == 0:
                        return
            self.epoch, self.trained = self.epoch + 1, []
            if rounds is None:
                return

    def _epoch(self) -> Generator[bool, None, None]:
        """One batch after the other; whether it ended a round."""
        controller = self.controller
        for picked in self.batches:
            mine = self.source.piece().samples
            time.sleep(0.0004 * mine * (1 + self.rank))  # the later a rank, the slower
            with controller.piece():
                loss = self.model(self.x[picked]).square().mean() / self.accumulate
                (controller.weight(loss) if self.loss_side else loss).backward()
            if controller.optimizer_due:
                self.optimizer.step()
                self.optimizer.zero_grad()
            controller.step(loss=loss * self.accumulate)
            self.trained += picked.tolist() if mine else []
            yield controller.met

    def state_dict(self) -> dict[str, Any]:
        """The controller's, as a user of this case saves it."""
        return self.controller.state_dict(gather=self.case.saves == "gather")

    def facts(self) -> dict[str, Any]:
        """What the controller says of itself, and which samples this rank trained on in this epoch."""
        controller = self.controller
        told = {"samples": controller.samples_seen, "sizes": controller.batch_sizes.tolist()}
        return {**told, "progress": controller.progress, "epoch": self.epoch, "trained": list(self.trained)}

    def close(self) -> None:
        self.controller.close()
