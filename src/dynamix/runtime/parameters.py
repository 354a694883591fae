"""Meeting over parameters: workers step apart on pieces of their own, and their models become one again (local SGD)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from dynamix.errors import ConfigError, UsageError
from dynamix.runtime.alike import comparing, differ, unlike
from dynamix.runtime.anchors import ZERO, Anchor, largest_of, scale_for
from dynamix.runtime.averaging import Maximum, Payload, Workers, broadcast_, buckets
from dynamix.runtime.optimizer_means import KNOWN, CopyOf, OptimizerMeans

if TYPE_CHECKING:  # the codec is imported by those who use it
    from dynamix.runtime.sparse_moves import SparseMoves

OptimizerState = Literal["averaged", "kept", "reset"]
_STATES = ("averaged", "kept", "reset")
_WIRES = {None: None, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class Averaging:
    """How models become one where workers meet over parameters: `controller.wrap(..., averaging=Averaging(...))`.

    Every worker has moved away from the parameters of the last meeting. The mean of these moves, weighted by the
    samples that each trained on, is what all go on with (local SGD, arXiv 1805.09767).

    optimizer_state   what becomes of momentum and other moments. "averaged": the mean over workers, also of Adam's
                      step; it travels with the parameters. "kept": each worker's own. "reset": forgotten
    outer             makes an optimizer of a list of parameters, which takes the mean move for its gradient, turned
                      round: `lambda ps: torch.optim.SGD(ps, lr=0.7, momentum=0.9, nesterov=True)` (DiLoCo, arXiv
                      2311.08105). None: the mean itself
    steps             "samples": a worker's move counts by its samples. "normalized": by its samples, as if all had
                      taken equally many steps (FedNova, arXiv 2007.07481), for workers whose data differ
    wire              "bfloat16" or "float16": the type in which moves travel, half the bytes. None: as they are
    early             a worker that is late meets after the piece that it is at, once half of the others wait; what it
                      has not trained comes first in its next round
    overlap           moves travel while the next round's first piece is trained, and each worker then goes on from the
                      mean with what it has moved meanwhile. Moments are averaged at the end of an epoch only
    sparse          rows of a parameter that no worker has moved do not travel, where that sends less: for embeddings
                    under an optimizer that leaves untouched rows alone. The mean is the same, up to the order of sums
    """

    optimizer_state: OptimizerState = "averaged"
    outer: Callable[[list[Tensor]], Optimizer] | None = None
    steps: Literal["samples", "normalized"] = "samples"
    wire: Literal["bfloat16", "float16"] | None = None
    early: bool = False
    overlap: bool = False
    sparse: bool = False

    def __post_init__(self) -> None:
        for name, allowed in (("optimizer_state", _STATES), ("steps", ("samples", "normalized")), ("wire", _WIRES)):
            if (value := getattr(self, name)) not in allowed:
                raise ConfigError(name, value, ", ".join(map(str, allowed)), "check the spelling")
        if self.outer is not None and not callable(self.outer):
            fix = "pass a function, such as lambda ps: torch.optim.SGD(ps, lr=0.7, momentum=0.9, nesterov=True)"
            raise ConfigError("outer", self.outer, "a function of a list of parameters, or None", fix)

        if self.early and self.overlap:
            fix = "take overlap for slow links, early for workers that stall"
            raise ConfigError("early", True, "False with overlap=True", fix)
        if self.sparse and self.overlap:
            fix = "take sparse for large embeddings, overlap for moves without zeros"
            raise ConfigError("sparse", True, "False with overlap=True", fix)

    @property
    def plainly(self) -> dict[str, Any]:
        """What must be alike on all ranks."""
        plain = {"optimizer_state": self.optimizer_state, "steps": self.steps, "wire": self.wire}
        return plain | {"early": self.early, "overlap": self.overlap, "sparse": self.sparse}


class ParameterMeeting:
    """One model and its optimizers, on this worker.

    workers   those that meet; payloads on the model's device
    beside    the same, for payloads on CPUs
    scaler    AMP's, if there is one: the smallest scale of all workers is the one to go on with

    It keeps a copy of the parameters and floating buffers: moves are counted from there, so what did not move stays as
    it is to the last bit.

    at_times    workers meet over gradients too. Then there is no copy before they step apart, and none once they meet
                over gradients again (but for an outer optimizer, which knows what is copied); and all count from the
                first worker's parameters, should those of unlike devices differ in their last bits
    """

    def __init__(
        self,
        model: nn.Module,
        how: Averaging,
        workers: Workers,
        beside: Workers,
        *,
        scaler: Any,
        at_times: bool = False,
    ) -> None:
        self.model, self.how, self.workers, self.beside, self.scaler = model, how, workers, beside, scaler
        self.optimizers: list[Optimizer] = []
        self.steps = 0  # of this worker since the last meeting
        self.weight = 1.0  # its part of the round before; as much as others' where there was none
        self._begun = False  # a round
        self._under_way: Iterator[None] | None = None  # the rest of a meeting whose moves travel
        self.groups: list[dist.ProcessGroup] = []  # its own
        self._changed = False  # since the last meeting, what moves are counted from
        self._anchors: list[Anchor] = []
        self._outer: Optimizer | None = None
        self._means: OptimizerMeans | None = None
        self.sparse: SparseMoves | None = None
        if how.sparse and workers.group is not None and workers.count > 1:
            from dynamix.runtime.sparse_moves import SparseMoves

            self.sparse = SparseMoves(workers)
        self._at_times, self._own = at_times, False  # whether what optimizers remember is each worker's own
        self.before_step: Callable[[], None] = self.begin  # of one of the optimizers
        if not at_times or how.outer is not None:
            self.begin()
        self._begun = self._changed = False

    @torch.no_grad()
    def begin(self) -> None:
        """A pass or step begins, perhaps a round's first: moves are counted from what the model is, whoever changed it.

        A pass need not go through the model's own call, so the optimizers' steps are looked at too.
        """
        if self._begun or self._under_way is not None:
            return
        self._begun = True
        tensors = self._travelling()
        if [id(t) for t in tensors] != [id(anchor.tensor) for anchor in self._anchors]:
            known = {id(anchor.tensor): anchor for anchor in self._anchors}
            self._anchors, self._changed = [known.get(id(t)) or Anchor(t) for t in tensors], True
            self._make_outer()
        for anchor in self._anchors:
            if anchor.tensor._version != anchor.version:
                anchor.keep()
                self._changed = True

    def _make_outer(self) -> None:
        """The outer optimizer of what is trained now; what the one before remembers of it, it knows too."""
        if self.how.outer is None:
            return
        values, before = [a.value for a in self._anchors if a.is_parameter], self._outer
        self._outer = self.how.outer(values)
        KNOWN.add(self._outer)
        if before is not None:
            self._outer.state.update({value: before.state[value] for value in values if value in before.state})

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """One more optimizer of the model. Raises `UsageError` for one that shares its state among ranks."""
        if type(optimizer).__name__ == "ZeroRedundancyOptimizer":
            fix = "give every rank its whole optimizer, or use meet='gradients'"
            raise UsageError(f"ZeroRedundancyOptimizer steps on all ranks at once, but workers step apart: {fix}")
        self.optimizers.append(optimizer)
        self._means = OptimizerMeans(self.optimizers, self.workers, self.beside)
        optimizer.register_step_pre_hook(lambda *_: self.before_step())

    def meet(self, weight: float, *, last: bool = True) -> None:
        """A collective call. `weight` is this worker's part of the round's samples; 0: its move does not count.

        last   of its epoch: also with `overlap` it is waited for here, and not in `land`
        """
        self.land()
        overlaps = self.how.overlap and self.workers.count > 1 and not last
        parts = self.meeting(weight, overlaps=overlaps)
        if overlaps:  # who compares waits for the last to come: at the epoch's end
            self._wait_for_each(self._prepare(compare=False))
            next(parts)
            self._under_way = parts
        else:
            self._wait_for_each(parts)

    def together(self) -> None:
        """A step over gradients begins. A collective call where workers have stepped apart before it."""
        self._wait_for_each(self.rejoining())

    @torch.no_grad()
    def rejoining(self) -> Iterator[None]:
        """`together`, in parts, as `meeting`: what each worker's optimizers remember becomes one."""
        own, self._own = self._own, False
        if own and self.how.optimizer_state == "kept" and self._means is not None:
            yield from self._means.meeting(self.weight)
        if own and self._outer is None:
            self._anchors = []

    @property
    def payload(self) -> float:
        """Bytes that a meeting moves, as optimizers are now, over those of a gradient."""
        gradient = sum(p.numel() * p.element_size() for p in self.model.parameters() if p.requires_grad)
        wire = _WIRES[self.how.wire]
        moved = sum(t.numel() * (max(t.element_size(), 4) if wire is None else 2) for t in self._travelling())
        if self.how.optimizer_state == "averaged":
            states = (state for optimizer in self.optimizers for state in optimizer.state.values())
            held = (v for state in states for v in state.values() if isinstance(v, Tensor))
            moved += sum(v.numel() * v.element_size() for v in held)
        return moved / max(gradient, 1)

    @property
    def lands(self) -> bool:
        """Whether there is something to wait for in `land`."""
        return self._under_way is not None

    def land(self) -> None:
        """Wait for the moves that travel, if there are any, and go on from their mean."""
        if self._under_way is not None:
            parts, self._under_way = self._under_way, None
            self.beside.wait()
            self.workers.wait()
            with torch.inference_mode(False):  # an evaluation may be what asks
                self._wait_for_each(parts)
            self._begun = self.steps > 0

    def _wait_for_each(self, parts: Iterator[None]) -> None:
        for _ in parts:
            self.beside.wait()
            self.workers.wait()

    @torch.no_grad()
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """A collective call at a meeting: `optimizer.state_dict()` with the means of what workers remember."""
        self.land()
        how = self.how
        alike = how.optimizer_state == "reset" or (how.optimizer_state == "averaged" and not how.overlap)
        if alike or (self._at_times and not self._own):
            return optimizer.state_dict()  # all have it alike
        one = CopyOf(optimizer)
        self._wait_for_each(OptimizerMeans([one], self.workers, self.beside).meeting(self.weight))
        return one.state_dict()

    @torch.no_grad()
    def meeting(self, weight: float, *, overlaps: bool = False) -> Iterator[None]:
        """`meet`, in parts: at every `yield` all that was begun has to arrive.

        overlaps   training goes on meanwhile
        """
        how, workers, steps = self.how, self.workers, self.steps
        self.weight = weight
        self.steps, self._begun, self._own = 0, False, True
        if not overlaps:
            yield from self._prepare()
        normalized = how.steps == "normalized"
        own, wire = weight / steps if normalized and steps else weight, _WIRES[how.wire]
        sent = [
            (anchors, Payload([a.move() for a in anchors], own, wire=wire, scales=[a.scale for a in anchors]))
            for anchors in self._in_buckets()
        ]
        for anchor in self._anchors:
            anchor.sent = anchor.tensor.detach().clone() if overlaps and anchor.is_parameter else None
        if self.sparse is not None:
            self.sparse.add([payload for _, payload in sent])
        else:
            for _, payload in sent:
                workers.add(payload.flat)
        largest = Maximum(counters) if (counters := self._counters()) else None
        if largest is not None:
            workers.add(largest.flat, dist.ReduceOp.MAX)
        if (scale := self._scale()) is not None:
            workers.add(scale, dist.ReduceOp.MIN)
        exact = normalized or how.wire is not None  # the sum of weights that a payload carries is not what is wanted
        weights = torch.tensor([weight, weight * steps], dtype=torch.float64)
        if exact:
            self.beside.add(weights)
        if how.optimizer_state == "reset":
            for optimizer in self.optimizers:
                optimizer.state.clear()
        if how.optimizer_state == "averaged" and self._means is not None and not overlaps:
            yield from self._means.meeting(weight)
        yield
        for anchors, payload in sent:
            for anchor, (_, mean) in zip(anchors, payload.sums() if exact else payload.means(), strict=True):
                anchor.mean = mean
        if exact:
            samples, stepped = weights.tolist()
            for anchor in self._anchors:
                anchor.mean.mul_(stepped / samples**2 if normalized else 1 / samples)
        self._move()
        if largest is not None:
            largest.take()
        if scale is not None:
            for own, least in zip((self.scaler._scale, self.scaler._growth_tracker), scale, strict=True):
                own.copy_(torch.minimum(own, least.to(own.dtype)))

    def _prepare(self, *, compare: bool = True) -> Iterator[None]:
        """What workers have to know of each other before they send their moves; in parts, as `meeting`."""
        if compare:
            yield from self._compare()
        if self.how.wire == "float16":
            largest = torch.stack([largest_of(anchor.move()) for anchor in self._anchors] or [ZERO])
            self.beside.add(largest, dist.ReduceOp.MAX)
            yield
            for anchor, of_all in zip(self._anchors, largest.tolist(), strict=False):
                anchor.scale = scale_for(of_all)

    def _compare(self) -> Iterator[None]:
        """All are about to average the same, and went on from the same. Raises `UsageError` on every rank if not."""
        if self.workers.group is None or self.workers.count == 1:
            return  # alone, or all in one process
        changed = False
        for changed in comparing(self._described(), self._changed, self.beside):  # noqa: B007 - the last one counts
            yield
        self._changed, differing = False, list[int]()
        if changed:
            for differing in unlike([anchor.value for anchor in self._anchors], self.beside):  # noqa: B007
                yield
        anchors = [self._anchors[i] for i in differing]
        for parameter in (anchor.tensor for anchor in anchors if anchor.is_parameter and not self._at_times):
            raise differ(next(name for name, p in self.model.named_parameters() if p is parameter))
        if anchors:  # buffers, which passes of a rank's own may change
            broadcast_([anchor.value for anchor in anchors], self.workers.group, self.workers.ending)

    def _described(self) -> list[str]:
        """What this rank sends, in words."""
        named = {id(t): name for name, t in (*self.model.named_parameters(), *self.model.named_buffers())}
        sent = [*(anchor.tensor for anchor in self._anchors), *self._counters()]
        words = [f"{named.get(id(t), 'a tensor')} {list(t.shape)} {t.dtype}" for t in sent]
        words += [f"an optimizer of {[len(g['params']) for g in of.param_groups]} parameters" for of in self.optimizers]
        return [*words, "no scaler's scale" if self._scale() is None else "a scaler's scale"]

    def _in_buckets(self) -> list[list[Anchor]]:
        of = {id(anchor.tensor): anchor for anchor in self._anchors}
        return [[of[id(tensor)] for tensor in bucket] for bucket in buckets(a.tensor for a in self._anchors)]

    def _move(self) -> None:
        """From the anchors by the mean moves, or as the outer optimizer makes of them."""
        outer = self._outer
        for anchor in self._anchors:
            if outer is None or not anchor.is_parameter:
                wide = torch.promote_types(anchor.value.dtype, anchor.mean.dtype)
                anchor.take(anchor.base(wide) + anchor.mean)
            else:
                anchor.value.grad = anchor.mean.neg().to(anchor.value.dtype)
        if outer is not None:
            outer.step()
            outer.zero_grad()
            for anchor in self._anchors:
                if anchor.is_parameter:
                    anchor.take(anchor.value)
        for anchor in self._anchors:
            del anchor.mean

    def _travelling(self) -> list[Tensor]:
        tensors: dict[int, Tensor] = {id(p): p for p in self.model.parameters() if p.requires_grad}
        tensors |= {id(b): b for b in self.model.buffers() if b.is_floating_point() or b.is_complex()}
        return list(tensors.values())

    def _counters(self) -> list[Tensor]:
        return [b for b in self.model.buffers() if not (b.is_floating_point() or b.is_complex())]

    def _scale(self) -> Tensor | None:
        """AMP's scale and the steps since it last grew, where it has begun."""
        scale = getattr(self.scaler, "_scale", None)
        if scale is None:
            return None
        return torch.stack([scale.reshape(()).float(), self.scaler._growth_tracker.reshape(()).float()])

    def close(self) -> list[dist.ProcessGroup]:
        """Hands over its own groups."""
        groups, self.groups = self.groups, []
        self.workers.group = self.beside.group = None
        return groups

    def facts(self) -> dict[str, Any]:
        """What must be alike on all ranks, by name."""
        outer = self._outer and f"{type(self._outer).__name__} {self._outer.defaults}"
        return self.how.plainly | {"outer": outer, "scaler": self.scaler is not None}

    def state_dict(self) -> dict[str, Any]:
        """The outer optimizer's, if there is one."""
        if self.how.outer is None or self._outer is None:
            return {}
        return {"outer": self._outer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._outer is not None:
            self._outer.load_state_dict(state["outer"])
