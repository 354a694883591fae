"""FSDP2 (`fully_shard`): weights each rank's gradients before the reduce-scatter, so the loop needs no change.

`set_custom_reduce_scatter` gets a group's gradients as this rank computed them. FSDP then takes their mean over the W
ranks of its mesh, so each is multiplied by n_i * W / N, as in DDP's hook. On a two-dimensional mesh (HSDP), too, every
data-parallel rank has its own share: the all-reduce comes after the reduce-scatter, and a mean of means over equally
large groups is the mean.
"""

import math
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dynamix.data import Piece, Round
from dynamix.errors import UsageError
from dynamix.runtime.part import Observation
from dynamix.runtime.sync.ddp import Hooked
from dynamix.runtime.sync.gradients import ADDED, Around, Check, GradientHook, GradientWeight, at_end_of_backward
from dynamix.runtime.sync.inner_hook import InnerHook
from dynamix.runtime.sync.shards import Shards
from dynamix.runtime.sync.single_worker import SingleWorker
from dynamix.runtime.sync.sync import LOSS_SIDE, Options, Sync

_REPLACED = "set_custom_reduce_scatter() was called after controller.wrap(), so gradients would not be weighted"
_GIVEN_BACK = (
    "with micro_batch= parameters stay gathered from a round's first piece to its last, and here they were given back "
    "in between: call state_dict(), reshard() and the like where controller.optimizer_due"
)


class ShardedHook(GradientHook):
    """`GradientHook` for FSDP2: gets every group's gradients before they are summed over ranks.

    FSDP2's groups take the place of buckets. A rank has only its shard of the reduced gradient. It reports the square
    of the shard's norm times the number of shards, so that the mean over ranks is the whole gradient's.
    """

    def __init__(self, shards: Shards, inner: InnerHook, around: Around, check: Check, *, scaler: Any) -> None:
        super().__init__(inner, around, check, scaler=scaler)
        self.shards = shards
        self._on_cpu = shards.device.type == "cpu"
        self._seen = set[int]()  # groups reduced since this batch's last synchronised backward pass began
        self._passing = False  # that pass still runs
        self._times: dict[int, int] = {}  # reductions of each group in this optimizer step
        self._sums: dict[int, bool] = {}  # whether it sums over ranks, and FSDP divides afterwards
        self._warned = False

    def attach(self) -> None:
        """Insert hooks into the model's collectives, to weight and time them."""
        for part, (module, group) in enumerate(zip(self.shards.modules, self.shards.groups, strict=True)):
            module.set_custom_reduce_scatter(_ReduceScatter(self, part, group._reduce_scatter_comm))
            if self._on_cpu:  # on other devices the device waits for a collective
                module.set_custom_all_gather(_AllGather(self, part, group._all_gather_comm))
            if _replicas(group) is not None:
                module.set_all_reduce_hook(_AllReduced(self, part, group._all_reduce_hook))

    def reduce_scatter(
        self, part: int, inner: Any, output: Tensor, values: Tensor, group: dist.ProcessGroup, op: Any
    ) -> Any:
        """Weight `values`, this rank's gradients of group `part`, and let `inner` reduce them into `output`."""
        if self.closed:
            raise UsageError("the model's controller is closed: wrap the model with a new one to train on")
        if (weight := self._begin_group(part, values)) is not None:
            weight.enter(values, self.group.size())
        self._sums[part] = op == dist.ReduceOp.SUM
        work = None
        if self._on_cpu and self.inner.native and op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            self._add_and_cut(output, values, group, op)
        else:
            work = inner(output_tensor=output, input_tensor=values, group=group, op=op)
        if _replicas(self.shards.groups[part]) is None:
            self.reduced(part, output)
        return work

    def _add_and_cut(self, output: Tensor, values: Tensor, group: dist.ProcessGroup, op: Any) -> None:
        """The result of gloo's reduce-scatter, but with a wait that can be aborted."""
        self.ranks.wait_here(dist.all_reduce(values, group=group, async_op=True), ADDED)
        output.copy_(values.view(group.size(), -1)[group.rank()].view_as(output))
        if op == dist.ReduceOp.AVG:
            output.div_(group.size())

    def reduced(self, part: int, values: Tensor) -> None:
        """Group `part` is reduced; `values` is this rank's shard of the mean over ranks, or of the sum."""
        if not self.recorder.muted and self._measuring and self._times.get(part) == 1:
            shards = int(self.shards.groups[part].mesh_info.shard_mesh_size)
            over = self.group.size() / self._divided(values) if self._sums[part] else 1.0
            self._tell_norm("global_sq", values, over / math.sqrt(shards), part)

    def _divided(self, values: Tensor) -> int:
        """The factor by which FSDP divides gradients before they are summed, against overflow in half precision."""
        workers, factor = self.group.size(), 1
        if values.dtype not in (torch.float32, torch.bfloat16):
            while workers % factor == 0 and workers / factor > factor:
                factor *= 2
        return factor

    def piece_done(self, piece: Piece, seen: Observation) -> None:
        super().piece_done(piece, seen)
        self._seen.clear()

    def round_done(self, done: Round) -> None:
        super().round_done(done)
        self._times.clear()

    def close(self) -> list[dist.ProcessGroup]:
        self.shards.stop_timing()
        return super().close()

    def _begin_group(self, part: int, values: Tensor) -> GradientWeight | None:
        if self.recorder.muted:
            return None
        begins = not self._seen or (part in self._seen and not self._passing)
        if begins:
            self._seen.clear()
            self.require_mean()
        if not self._passing:
            self._passing = at_end_of_backward(self._pass_over)
        self._seen.add(part)
        times = self._times[part] = self._times.get(part, 0) + 1
        share = self.begin(part, values, first=begins, measured=times == 1, divided=self._divided(values))
        if times == 2 and (self._measuring or self._norms_due):
            self._unknown(part)
        return share

    def _pass_over(self) -> None:
        self._passing = False

    def _unknown(self, part: int) -> None:
        """A gradient that is reduced twice in an optimizer step has no known norm: no rank ever holds the whole sum."""
        for name in ("local_sq", "global_sq"):
            self.recorder.add(name, torch.tensor(math.nan), part=part)
        if not self._warned:
            self._warned = True
            several = "FSDP reduces gradients several times in an optimizer step, so the noise scale is not measured"
            fix = "put the passes of every batch under `with controller.piece():`, which reduces them once"
            warnings.warn(f"{several}: {fix}", RuntimeWarning, stacklevel=2)

    def require_mean(self) -> None:
        """Raise `UsageError` if FSDP is configured to divide by another number than that of ranks."""
        workers = self.group.size()
        for group in self.shards.groups:
            factor = getattr(group, "gradient_divide_factor", None)
            if factor not in (None, workers):
                told = f"set_gradient_divide_factor({factor}) makes FSDP divide by that, and not by its {workers} ranks"
                wrong = f"a weighted gradient would be {workers / factor:g} times the mean"
                self.loop.fail(f"{told}, so {wrong}: leave it out")


class _Called:
    """Called by FSDP2 for group `part`; calls `inner`, FSDP2's own object.

    `own` is what FSDP2 has called so far. If that belongs to a closed controller, `inner` is what it called.
    """

    def __init__(self, hook: ShardedHook, part: int, own: Any) -> None:
        self.hook, self.part = hook, part
        self.inner: Any = own.inner if isinstance(own, _Called) else own

    def allocate(self, *args: Any, **kwargs: Any) -> Tensor:
        """Allocate memory for a collective."""
        return self.inner.allocate(*args, **kwargs)  # type: ignore[no-any-return]


class _ReduceScatter(_Called):
    """Reduces the group: a `torch.distributed.fsdp.ReduceScatter`."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> Any:
        return self.hook.reduce_scatter(self.part, self.inner, output_tensor, input_tensor, group, op)


class _AllGather(_Called):
    """Gathers the group on CPUs, with a wait that another rank can end."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        own = not (async_op or self.hook.closed)
        work = self.inner(output_tensor=output_tensor, input_tensor=input_tensor, group=group, async_op=async_op or own)
        if own:  # in an evaluation a rank that has closed its controller may still come
            self.hook.ranks.wait_here(work, ADDED, left=torch.is_grad_enabled())
        return work if async_op else None


class _AllReduced(_Called):
    """Called on a two-dimensional mesh when the group's gradients are summed over its replicas, too."""

    def __call__(self, values: Tensor) -> None:
        self.hook.reduced(self.part, values)
        if self.inner is not None:
            self.inner(values)


class ShardedPasses(Sync):
    """A model under FSDP2. Gradients of earlier batches may be kept back, outside `.grad`.

    With pieces, parameters are gathered in a round's first pass and stay gathered until its last. Ranks run different
    numbers of passes in between, so no rank may gather there.
    """

    settled = False
    comes_first = True  # the wait for parameters that FSDP2 gathers is part of the step

    def __init__(self, model: nn.Module, shards: Shards, around: Around, *owners: Any, exchanges: str = "none") -> None:
        super().__init__(model, around.recorder, *owners, exchanges=exchanges)
        self.shards = shards
        self._begun: Piece | None = None  # the piece of the last forward pass of training
        self._handed: Piece | None = None  # the piece of the last forward pass that records gradients
        self._held: list[Any] = []  # groups that stay gathered until the round's last piece
        self._local = ExitStack()  # open while gradients of the current batch stay local
        if around.in_pieces:
            model.register_forward_hook(self._after_forward)

    def pass_begins(self, piece: Piece, kept: bool) -> None:
        if piece.by_size and piece is not self._handed:
            self._handed = piece
            self._local.close()  # the previous batch may have been aborted
            if not piece.last:
                self._local.enter_context(self._without_sync())
                self._local.enter_context(self.shards.staying_gathered())

    @contextmanager
    def _without_sync(self) -> Iterator[None]:
        model: Any = self.model
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)

    def _after_forward(self, *of: Any) -> None:
        if self._begun is not None and self._begun.by_size and not self._begun.last:
            self._held = [group for group in self.shards.groups if group.is_unsharded]

    def piece_done(self, piece: Piece, seen: Observation) -> None:
        self._local.close()

    def before_forward(self, piece: Piece) -> None:
        if piece is self._begun:
            return
        self._begun = piece
        if piece.number == 0:
            self._forget()
        elif not all(group.is_unsharded for group in self._held):
            self.given_back()
        if piece.last:
            self._held = []

    def given_back(self) -> None:
        """Raise `UsageError`: parameters were resharded between two pieces."""
        raise UsageError(_GIVEN_BACK)

    def _forget(self) -> None:
        """Discard the gradients of an aborted round, which is dealt again, so that nothing is added to them."""
        self.shards.drop()
        held, self._held = self._held, []
        for module, group in zip(self.shards.modules, self.shards.groups, strict=True):
            if group in held:
                module.reshard()

    def piece(self, piece: Piece) -> AbstractContextManager[None]:
        return nullcontext() if piece.last or piece.by_size else self._without_sync()

    def close(self) -> list[dist.ProcessGroup]:
        self._local.close()
        self._forget()
        return super().close()

    def own_gradients(self) -> list[Tensor]:
        """The gradients not yet reduced: FSDP adds them to reduced ones, which have their own weight."""
        return self.shards.kept_back()


class ShardedGradients(Hooked, ShardedPasses):
    """A model under FSDP2 whose gradients are weighted before the reduce-scatter."""

    def __init__(self, model: nn.Module, shards: Shards, around: Around, hook: ShardedHook) -> None:
        self.hook = hook
        super().__init__(model, shards, around, hook, exchanges="reduce-scatter")

    def before_forward(self, piece: Piece) -> None:
        if not all(getattr(group._reduce_scatter_comm, "hook", None) is self.hook for group in self.shards.groups):
            self.hook.loop.fail(f"{_REPLACED}: call it before, and {LOSS_SIDE}")
        super().before_forward(piece)

    def given_back(self) -> None:
        self.hook.loop.fail(_GIVEN_BACK)


def attach_sharded(model: nn.Module, options: Options, around: Around) -> Sync:
    """Connect a model under FSDP2. Raises `UsageError`, which says what the model needs."""
    group, recorder = around.group, around.recorder
    options.require_no_hook()
    shards = Shards.of(model)
    if group is None or around.ranks.workers == 1:
        return _unhooked(model, shards, around)
    if shards is not None and (theirs := shards.wrong_ranks(ours := dist.get_process_group_ranks(group))) is not None:
        fix = "give both the data-parallel dimension of one mesh: process_group=mesh.get_group()"
        raise UsageError(f"FSDP averages over ranks {theirs}, but the controller has ranks {ours}: {fix}")
    if shards is None or (reason := _cannot_weigh(model, shards)) is not None:
        reason = reason if shards is not None else "dynamix cannot read how this torch holds FSDP's parameters"
        if options.weighting == "hook":
            raise UsageError(f"{reason}: {LOSS_SIDE}")
        told = "so exchange, waiting and the noise scale are not measured"
        warnings.warn(f"{reason}, {told}; gradients are weighted in the loss", RuntimeWarning, stacklevel=5)
        recorder.times.see_no_communication()
        return _unhooked(model, shards, around)
    inner = InnerHook(group, None, None, device=shards.device.type)
    check = around.watch(reduces=True, hooked=False, shards=shards)
    entry = ShardedHook(shards, inner, around, check, scaler=options.scaler)
    entry.require_mean()
    entry.attach()
    shards.time_exchanges(recorder.timer)
    return ShardedGradients(model, shards, around, entry)


def _unhooked(model: nn.Module, shards: Shards | None, around: Around) -> Sync:
    """Connect a model whose gradients no hook weights."""
    around.watch(reduces=False, hooked=False, shards=shards)
    if around.ranks.workers == 1:
        return SingleWorker(model, around)
    return Sync(model, around.recorder) if shards is None else ShardedPasses(model, shards, around)


def _cannot_weigh(model: nn.Module, shards: Shards) -> str | None:
    """Why weights cannot be applied in the reduce-scatter; None if they can."""
    if not hasattr(model, "set_custom_reduce_scatter"):
        return f"FSDP of torch {torch.__version__} has no set_custom_reduce_scatter(), in which gradients are weighted"
    sharded = {id(p) for p in shards.parameters()}
    if left := [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in sharded]:
        named = ", ".join(left[:3])
        return f"fully_shard() does not shard {named}, which your loop must freeze or average over the ranks"
    for module, group in zip(shards.modules, shards.groups, strict=True):
        if sum(module is other for other in shards.modules) > 1:
            return f"parameters of one {type(module).__name__} are on several meshes"
        if getattr(group.mesh_info, "shard_mesh_size", 1) == 1:
            return "FSDP shards over one rank, where nothing is scattered"
        comm = group._reduce_scatter_comm
        if isinstance(comm, _ReduceScatter):
            if not comm.hook.closed:
                return "the model is connected to another controller"
        elif not type(comm).__module__.startswith("torch.distributed."):
            return f"the model has a reduce-scatter of its own, {type(comm).__name__}"
    return None


def _replicas(group: Any) -> Any:
    """The group of ranks with the same shard of this group's parameters; None on a one-dimensional mesh."""
    return getattr(group.mesh_info, "replicate_process_group", None)
