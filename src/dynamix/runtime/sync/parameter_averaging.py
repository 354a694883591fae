"""Averages parameters: workers take local steps on their own pieces, then their models are averaged (local SGD)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from dynamix.data import Piece
from dynamix.errors import ConfigError, UsageError, spelling
from dynamix.removed import message, refuses_averaging
from dynamix.runtime.part import Part
from dynamix.runtime.sync.collectives import Maxima, Sums, Workers, broadcast_, has_mean, require_sums
from dynamix.runtime.sync.optimizer_means import KNOWN, GroupMemory, OptimizerMeans
from dynamix.runtime.sync.reference_weights import ReferenceWeights, Untrained

OptimizerState = Literal["averaged", "kept", "reset"]
_CHANGED = (
    "load checkpoints on every rank, change a model alike on all of them, and call optimizer.step() before "
    "controller.step()"
)
_STATES = "the ranks could not average the state of their optimizers"
_WIRES = {None: None, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Averaging:
    """How models are averaged after local steps: `controller.wrap(..., averaging=Averaging(...))`.

    Every worker's parameters have moved since the last averaging. All workers continue from the mean of these moves,
    weighted by the samples that each trained on (local SGD, arXiv 1805.09767).

    optimizer_state   momentum and other moments. "averaged": replaced by the mean over workers, also Adam's step
                      counter; they are sent with the parameters. "kept": each worker keeps its own. "reset": discarded
    outer             makes an optimizer from a list of parameters; its gradient is the negative mean move:
                      `lambda ps: torch.optim.SGD(ps, lr=0.7, momentum=0.9, nesterov=True)` (DiLoCo, arXiv 2311.08105).
                      None: the mean move is applied
    wire              "bfloat16": the type in which moves are sent, half the bytes. None: unchanged
    """

    optimizer_state: OptimizerState = "averaged"
    outer: Callable[[list[Tensor]], Optimizer] | None = None
    wire: Literal["bfloat16"] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.wire == "float16":  # type: ignore[comparison-overlap]
            raise ConfigError("wire", self.wire, "bfloat16 or None", message("Averaging(wire='bfloat16')"))
        for name, allowed in (("optimizer_state", get_args(OptimizerState)), ("wire", _WIRES)):
            if (value := getattr(self, name)) not in allowed:
                names = [str(each) for each in allowed]
                raise ConfigError(name, value, ", ".join(names), spelling(value, names))
        if self.outer is not None and not callable(self.outer):
            fix = "pass a function, such as lambda ps: torch.optim.SGD(ps, lr=0.7, momentum=0.9, nesterov=True)"
            raise ConfigError("outer", self.outer, "a function of a list of parameters, or None", fix)


# After the class definition, because a dataclass generates its `__init__`.
Averaging.__init__ = refuses_averaging(Averaging.__init__)  # type: ignore[method-assign]


class ParameterAveraging(Part):
    """Averages one model and its optimizers, on this worker.

    workers   the workers to average over
    scaler    AMP's, if any: all continue with the smallest scale of all workers

    It keeps a copy of the parameters and floating buffers. Moves are differences from this copy, so a value that did
    not move stays bit-identical.

    at_times    some rounds average gradients instead. Then a copy exists only from the first local step until gradients
                are averaged again (an outer optimizer keeps it, because its state refers to the copy). All workers move
                from the first worker's parameters, because those of unlike devices may differ in their last bits
    """

    def __init__(
        self, model: nn.Module, how: Averaging, workers: Workers, *, scaler: Any, at_times: bool = False
    ) -> None:
        self.model, self.how, self.workers, self.scaler = model, how, workers, scaler
        self.optimizers: dict[Optimizer, GroupMemory] = {}  # with the state that each keeps in its groups
        self.weight = 1.0  # this worker's part of the last round; equal parts before the first
        self._begun = self._changed = False  # a round has begun; reference weights have changed since averaging
        self._anchors: list[ReferenceWeights] = []
        self._untrained = Untrained(model)
        self._outer: Optimizer | None = None
        self._means = OptimizerMeans(self.optimizers, workers)
        self._at_times, self._own = at_times, False  # whether optimizer states differ by worker
        if not at_times or how.outer is not None:
            self.begin()
        self._begun = self._changed = False

    def pass_begins(self, piece: Piece, kept: bool) -> None:
        if piece.round.apart:
            self.begin()

    def before_step(self, piece: Piece | None) -> None:
        """An optimizer is about to step, for `piece` if there is a current batch."""
        if not self._at_times or (piece is not None and piece.round.apart):
            self.begin()
        elif piece is not None:
            self.rejoin()

    @torch.no_grad()
    def begin(self) -> None:
        """A pass or step begins, perhaps a round's first: moves count from the model's values now, whoever set them.

        A pass may bypass the model's own call, so optimizer steps call this, too.
        """
        if self._begun:
            return
        self._begun = True
        self._untrained.look()
        tensors = self._travelling()
        if [id(t) for t in tensors] != [id(anchor.tensor) for anchor in self._anchors]:
            known = {id(anchor.tensor): anchor for anchor in self._anchors}
            names = {id(tensor): name for name, tensor in self._replaceable().items()}
            made = (known.get(id(t)) or ReferenceWeights(t, names.get(id(t), "")) for t in tensors)
            self._anchors, self._changed = list(made), True
            self._make_outer()
        looks = self._outer is not None  # an outer optimizer must not treat a change as a move
        for anchor in self._anchors:
            if anchor.tensor._version != anchor.version or (looks and not torch.equal(anchor.tensor, anchor.value)):
                anchor.keep()
                self._changed = True

    def _make_outer(self) -> None:
        """Make the outer optimizer of the parameters trained now; it takes over the previous one's state of them."""
        if self.how.outer is None:
            return
        values, before = [a.value for a in self._anchors if a.is_trained], self._outer
        self._outer = self.how.outer(values)
        KNOWN.add(self._outer)
        if before is not None:
            self._outer.state.update({value: before.state[value] for value in values if value in before.state})

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Add an optimizer of the model. Raises `UsageError` for one that distributes its state over ranks."""
        if type(optimizer).__name__ == "ZeroRedundancyOptimizer":
            fix = "give every rank its whole optimizer, or use meet='gradients'"
            raise UsageError(f"ZeroRedundancyOptimizer steps on all ranks at once, but workers make local steps: {fix}")
        self.optimizers[optimizer] = GroupMemory(optimizer)

    @torch.no_grad()
    def rejoin(self) -> None:
        """A step with averaged gradients begins: average the workers' optimizer states.

        A collective call, if workers have taken local steps before it.
        """
        own, self._own = self._own, False
        if own and self.how.optimizer_state == "kept":
            with self.workers.ranks.naming(_STATES):
                self._means.meet(self.weight)
        if own and self._outer is None:
            self._anchors = []

    @property
    def payload(self) -> float:
        """Bytes that an averaging sends, with the optimizers' present state, relative to a gradient's."""
        gradient = sum(p.numel() * p.element_size() for p in self.model.parameters() if p.requires_grad)
        wire = _WIRES[self.how.wire]
        moved = sum(t.numel() * (max(t.element_size(), 4) if wire is None else 2) for t in self._travelling())
        if self.how.optimizer_state == "averaged":
            states = (state for optimizer in self.optimizers for state in optimizer.state.values())
            held = (v for state in states for v in state.values() if isinstance(v, Tensor))
            moved += sum(v.numel() * v.element_size() for v in held)
        return moved / max(gradient, 1)

    @torch.no_grad()
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """A collective call at the end of a round: `optimizer.state_dict()` with its state averaged over workers."""
        if self.how.optimizer_state != "kept" or (self._at_times and not self._own):
            return optimizer.state_dict()  # equal on all workers
        told = copy.deepcopy(optimizer.state_dict())
        means = OptimizerMeans({optimizer: self.optimizers[optimizer]}, self.workers)
        with self.workers.ranks.naming(_STATES):
            means.meet(self.weight, told)
        return told

    def meet(self, weight: float) -> None:
        """Average. A collective call. `weight`: this worker's part of the round's samples; 0: its move is ignored."""
        with self.workers.ranks.naming("the ranks could not average their models"):
            self._meet(weight)

    @torch.no_grad()
    def _meet(self, weight: float) -> None:
        how, workers = self.how, self.workers
        self.weight, self._begun, self._own = weight, False, True
        self._follow()
        self._compare()
        moves = Sums([anchor.move() for anchor in self._anchors], weight, workers, wire=_WIRES[how.wire])
        largest = Maxima([t for t in self._replaceable().values() if not has_mean(t)], workers)
        if (scale := self._scale()) is not None:
            workers.add(scale, dist.ReduceOp.MIN)
        if how.optimizer_state == "reset":
            for optimizer in self.optimizers:
                optimizer.state.clear()
        if how.optimizer_state != "kept":
            self._means.meet(weight)
        workers.wait()
        self._move(moves.means())
        largest.take()
        if scale is not None:
            for own, least in zip((self.scaler._scale, self.scaler._growth_tracker), scale, strict=True):
                own.copy_(least)

    def _follow(self) -> None:
        """Passes may have replaced buffers by other tensors, as `self.mean = ...` does."""
        now = self._replaceable()
        for anchor in self._anchors:
            if (tensor := now.get(anchor.name, anchor.tensor)) is not anchor.tensor:
                anchor.follow(tensor)

    def _compare(self) -> None:
        """Check that all average the same tensors, from the same start. Raises `UsageError` on every rank if not."""
        if self.workers.count == 1:
            return
        moved = self._untrained.moved()
        if self.workers.group is None:  # all workers are in one process
            self._take_along(moved)
            return
        changed = self.workers.any_changed(self._described(), self._changed or any(moved.values()))
        self._changed = False
        if not changed:
            return
        differing = self.workers.unlike([anchor.value for anchor in self._anchors])
        self._take_along(moved)
        anchors = [self._anchors[i] for i in differing]
        for parameter in (anchor.tensor for anchor in anchors if anchor.is_trained and not self._at_times):
            named = (name for name, p in self.model.named_parameters() if p is parameter)
            name = next(named, f"a parameter of shape {list(parameter.shape)} beside the model")
            raise UsageError(f"{name} was not the same on all ranks when local steps began: {_CHANGED}")
        if anchors:  # buffers, which a rank's own passes may change
            broadcast_([anchor.value for anchor in anchors], self.workers.group, self.workers.ranks)

    def _take_along(self, moved: dict[str, bool]) -> None:
        """Average an untrained tensor from now on if it `moved` on some rank: this time its values, because there is no
        copy of what it was. Raises `UsageError` for one that has no mean."""
        if not moved:
            return
        flags = torch.tensor([*moved.values()], dtype=torch.float64)
        self.workers.add(flags, dist.ReduceOp.MAX)
        self.workers.wait()
        self._untrained.let_go(name for name, flag in zip(moved, flags.tolist(), strict=True) if flag)
        now = self._untrained.travelling()
        named = {name: p.detach() for name, p in now.items() if name in moved and has_mean(p)}
        require_sums(named.items())
        sums = Sums(named.values(), self.weight, self.workers)
        self.workers.wait()
        for tensor, mean in zip(named.values(), sums.means(), strict=True):
            tensor.copy_(mean)

    def _described(self) -> list[str]:
        """A description of the tensors that this rank sends."""
        named = {id(t): name for name, t in (*self.model.named_parameters(), *self.model.named_buffers())}
        counters = (t for t in self._replaceable().values() if not has_mean(t))
        sent = [*(anchor.tensor for anchor in self._anchors), *counters]
        words = [f"{named.get(id(t), 'a tensor')} {list(t.shape)} {t.dtype}" for t in sent]
        words.append(f"{len(self._untrained.seen)} parameters that nobody moves")
        words += [f"an optimizer of {[len(g['params']) for g in of.param_groups]} parameters" for of in self.optimizers]
        return [*words, "no scaler's scale" if self._scale() is None else "a scaler's scale"]

    def _move(self, moves: list[Tensor]) -> None:
        """Move the parameters from the reference weights by the mean `moves`, or by the outer optimizer's step."""
        outer = self._outer
        for anchor, move in zip(self._anchors, moves, strict=True):
            if outer is None or not anchor.is_trained:
                anchor.go(move)
            else:
                anchor.show(move)
        if outer is not None:
            outer.step()
            outer.zero_grad()
            for anchor in self._anchors:
                if anchor.is_trained:
                    anchor.take(anchor.value)

    def _travelling(self) -> list[Tensor]:
        groups = (group for optimizer in self.optimizers for group in optimizer.param_groups)
        every = [*self.model.parameters(), *(p for group in groups for p in group["params"])]
        found = [p for p in every if p.requires_grad] + [t for t in self._replaceable().values() if has_mean(t)]
        return list({id(t): t for t in found}.values())

    def _replaceable(self) -> dict[str, Tensor]:
        """Buffers, and other tensors that only the loop changes, by name."""
        return {**self._untrained.travelling(), **dict(self.model.named_buffers())}

    def _scale(self) -> Tensor | None:
        """AMP's scale, and the steps since it last grew; None before its first use."""
        scale = getattr(self.scaler, "_scale", None)
        if scale is None:
            return None
        return torch.stack([scale.reshape(()).float(), self.scaler._growth_tracker.reshape(()).float()])

    def close(self) -> list[dist.ProcessGroup]:
        """Release the groups, and return the one that was made for this."""
        return self.workers.close()

    def facts(self) -> dict[str, Any]:
        """State that must be equal on all ranks, by name."""
        outer = self._outer and f"{type(self._outer).__name__} {self._outer.defaults}"
        how = {"optimizer_state": self.how.optimizer_state, "wire": self.how.wire}
        return how | {"outer": outer, "scaler": self.scaler is not None}

    def state_dict(self) -> dict[str, Any]:
        """The outer optimizer's state, if there is one."""
        return {} if self._outer is None else {"outer": self._outer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._outer is not None:
            self._outer.load_state_dict(state["outer"])
