"""DDP: weights gradients in its communication hook, and exchanges buffers as `batchnorm` says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dynamix.data import Piece, Round
from dynamix.errors import UsageError
from dynamix.runtime.part import Observation
from dynamix.runtime.ranks.compare import hook_settings
from dynamix.runtime.sync.collectives import average_, broadcast_
from dynamix.runtime.sync.gradients import Around, GradientHook, scale_, wipe_nonfinite_
from dynamix.runtime.sync.holding import holding, put
from dynamix.runtime.sync.inner_hook import InnerHook
from dynamix.runtime.sync.local_sgd import averaging_of
from dynamix.runtime.sync.other_reductions import require_no_optimizers_in_backward
from dynamix.runtime.sync.parameter_averaging import ParameterAveraging
from dynamix.runtime.sync.shards import is_fully_sharded
from dynamix.runtime.sync.single_worker import SingleWorker
from dynamix.runtime.sync.sync import LOSS_SIDE, Options, Sync

_ALIKE = ("find_unused_parameters", "static_graph", "broadcast_buffers", "bucket_bytes_cap")


class Hooked(Sync):
    """A model whose gradients are reduced over ranks by `hook`, in every synchronised backward pass."""

    hook: GradientHook

    @property
    def crossed(self) -> int:  # type: ignore[override]
        return self.hook.crossed

    @torch.no_grad()
    def make_ready(self, piece: Piece, applied: float | Tensor | None) -> None:
        if applied is not None and not piece.samples:
            # A loss times 0 has a zero gradient, but 0 * NaN is NaN if the placeholder's gradient was not finite.
            for gradient in self.own_gradients():
                wipe_nonfinite_(gradient)
        super().make_ready(piece, applied)

    def passes_discarded(self) -> None:
        self.hook.make_groups()

    @property
    def whose(self) -> str:
        return type(self.hook.inner.state).__name__


class DDPGradients(Hooked):
    """A model under DDP whose every pass is synchronised, except those that the loop runs under `no_sync()`."""

    model: DistributedDataParallel

    def __init__(self, model: nn.Module, hook: GradientHook, options: Options, *others: Any) -> None:
        own, self.hook = options.hook, hook
        name = "all-reduce" if own is None else getattr(own, "__qualname__", type(own).__name__)
        settings = {option: getattr(model, option, None) for option in _ALIKE}
        settings |= {"losses scaled": options.scaler is not None, **hook_settings(options.hook_state)}
        exchanges = f"{name}, buffers {options.batchnorm}"
        super().__init__(model, hook.recorder, hook, *others, exchanges=exchanges, settings=settings)
        self.alike, self.settled = hook.inner.alike, False

    def before_forward(self, piece: Piece) -> None:
        self.settled = self.hook.buckets_seen > 0
        if self.settled:
            return
        if self.model.static_graph and not self.model.require_backward_grad_sync:
            do = "leave no_sync() out in the first optimizer step, or call controller.warm_up(forward_backward)"
            raise UsageError(f"DDP(static_graph=True) needs a first backward that synchronises: {do}")
        require_no_optimizers_in_backward(self.model)

    def piece(self, piece: Piece) -> AbstractContextManager[None]:
        return self.model.no_sync() if piece.round.apart or not piece.last else nullcontext()

    @torch.no_grad()
    def make_ready(self, piece: Piece, applied: float | Tensor | None) -> None:
        """If the loop does not use `no_sync`, gradients already reduced have the union batch's weight."""
        micro, counts, reductions = piece.plan.micro, piece.round.counts, self.hook.reductions
        if applied is None and reductions and (counts != counts[0]).any():
            if reductions != micro + 1:
                do = "use no_sync() for all micro-batches of an optimizer step but the last, or for none of them"
                raise UsageError(f"some of this step's earlier micro-batches synchronised and some did not: {do}")
            union = counts.sum(1)
            if union[micro + 1]:
                scale_(self.own_gradients(), float(union.mean() / union[micro + 1]))
        else:
            super().make_ready(piece, applied)

    @contextmanager
    def alone(self) -> Iterator[None]:
        model = self.model
        if model.static_graph and not self.hook.buckets_seen:
            do = "call controller.warm_up(forward_backward) before find_limits"
            raise UsageError(f"DDP(static_graph=True) needs a first backward that synchronises: {do}")
        # Forward passes would broadcast buffers.
        with model.no_sync(), holding(model, require_forward_param_sync=False):
            yield


class LocalPasses(DDPGradients):
    """A model under DDP with local passes: those of local steps, and those of a round's pieces except the last.

    DDP reads `require_backward_grad_sync` in a forward pass. It is turned off before a local pass, and on again when
    the batch is done. If the loop itself has turned it off, it stays off.
    """

    def __init__(self, model: nn.Module, hook: GradientHook, options: Options, *others: Any) -> None:
        super().__init__(model, hook, options, *others)
        self._local = ExitStack()  # open while passes of the current batch stay local

    def pass_begins(self, piece: Piece, kept: bool) -> None:
        if piece.round.apart or (piece.by_size and not piece.last):
            if self.model.require_backward_grad_sync:
                self._local.enter_context(self.model.no_sync())
        else:
            self._local.close()  # the previous batch may have been aborted

    def piece_done(self, piece: Piece, seen: Observation) -> None:
        self._local.close()

    def close(self) -> list[dist.ProcessGroup]:
        self._local.close()
        return super().close()


class EitherWay(LocalPasses):
    """A model under DDP whose workers average gradients or parameters, as each round's plan says."""

    def round_done(self, done: Round) -> None:
        if not done.apart:
            # DDP would do this in its next pass. It is a collective, but that pass may be local.
            self.model.reducer._rebuild_buckets()
            return
        # Averaging makes buffers equal. Only a pass of this rank would have turned their exchange off.
        put(self.model, require_forward_param_sync=False)
        if self.model.find_unused_parameters:
            # DDP also counts parameters used in local passes, and would then require their gradients.
            self.model.reducer._reset_state()


def attach(
    model: nn.Module, options: Options, around: Around, averaging: Callable[[], ParameterAveraging] | None = None
) -> Sync:
    """Connect `model`, whose gradients are averaged. If rounds may average parameters, `averaging` makes what does so.

    Raises `UsageError`, which says what the model needs.
    """
    group, recorder, alone = around.group, around.recorder, around.ranks.workers == 1
    if options.weighting == "hook" and not alone and (reason := _needs_loss_side(model)) is not None:
        raise UsageError(f"{reason}: {LOSS_SIDE}")
    if not isinstance(model, DistributedDataParallel) or group is None:
        options.require_no_hook()
        around.watch(reduces=False, hooked=False)
        if averaging is not None:
            return Sync(model, recorder, averaging())
        if alone:
            return SingleWorker(model, around)
        recorder.times.see_no_communication()
        return Sync(model, recorder, alike=True)
    device = next((p.device.type for p in model.parameters() if p.requires_grad), "cpu")
    inner = InnerHook(group, options.hook, options.hook_state, device=device)
    check = around.watch(reduces=not alone, hooked=inner.chained)
    hook = GradientHook(inner, around, check, scaler=options.scaler)
    hook.register(model)
    exchange_buffers(model, hook, averaged=options.batchnorm == "weighted")
    if averaging is not None:
        return EitherWay(model, hook, options, averaging())
    return (LocalPasses if around.in_pieces else DDPGradients)(model, hook, options)


def attach_both(model: nn.Module, options: Options, around: Around) -> Sync:
    """Connect a model whose workers average gradients or parameters, as each round's plan says.

    A collective call. Raises `UsageError`, which says what the model needs.
    """
    if options.weighting != "hook":
        fix = "leave it out, or say meet='gradients'"
        weighs = f"wrap(weighting={options.weighting!r}) weights losses, which does not go with meet='auto'"
        raise UsageError(f"{weighs}: {fix}")
    if around.ranks.workers > 1 and not isinstance(model, DistributedDataParallel):
        fix = "controller.wrap(DistributedDataParallel(net), optimizer)"
        raise UsageError(f"meet='auto' needs DDP, because gradients meet in some rounds: write {fix}")
    if isinstance(model, DistributedDataParallel) and model.static_graph:
        fix = "leave static_graph out, or say meet='gradients'"
        raise UsageError(f"DDP(static_graph=True) expects the same in every pass, but rounds differ: {fix}")
    return attach(model, options, around, lambda: averaging_of(model, options, around, at_times=True))


def exchange_buffers(model: DistributedDataParallel, weights: GradientHook, *, averaged: bool) -> None:
    """Exchange DDP's buffers before each of its forward passes. This, too, may find that a rank is lost."""
    from torch.nn.parallel.distributed import _BufferCommHookLocation

    group, ranks, recorder = weights.group, weights.ranks, weights.recorder
    last = [1.0 / group.size()]  # n_i/N of the previous step, which produced the buffers

    def hook(state: Any, buffers: dict[str, Tensor]) -> None:
        piece = weights.piece if model.training else None
        if piece is not None and piece.round.apart:
            return  # DDP calls this before the first of several local passes
        with ranks.naming("the ranks could not exchange the model's buffers"), recorder.timer.exchanging():
            if averaged:
                # With unequal shares the first rank, whose buffers DDP would use, may have the noisiest statistics.
                average_(buffers.values(), last[0], group, ranks)
                if piece is not None and not recorder.muted:
                    last[0] = piece.share / piece.round.samples
            elif any(buffer.device.type != "cpu" for buffer in buffers.values()):
                model._default_broadcast_coalesced()
            else:
                broadcast_(buffers.values(), group, ranks)

    model._register_buffer_comm_hook(None, hook, _BufferCommHookLocation.PRE_FORWARD)


def _needs_loss_side(model: nn.Module) -> str | None:
    if any(is_fully_sharded(module) for module in model.modules()):
        return "FSDP holds a part of the model only: call fully_shard() on the whole model, too"
    if any(isinstance(module, nn.SyncBatchNorm) for module in model.modules()):
        return "SyncBatchNorm's backward mixes gradients of all ranks before any communication hook sees them"
    if not isinstance(model, DistributedDataParallel):
        return f"{type(model).__name__} is no DDP model: write wrap(DDP(net), optimizer), or average gradients yourself"
    return None
