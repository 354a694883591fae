"""Weights the loss instead of the gradient, also if only the loop knows its divisor N."""

import functools
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable

from dynamix.data import Piece
from dynamix.errors import ConfigError, UsageError
from dynamix.runtime.ranks.process_groups import new_gloo_group
from dynamix.runtime.ranks.ranks import ALONE, Ranks
from dynamix.runtime.sync.shards import gradients_of

_WEIGHED = "weighed by dynamix"  # metadata key of a weighted loss's node
_NODES = 100  # nodes of a loss's graph to visit


class LossWeight:
    """The loss side: loss * n_i * W / N. N is known from the sample plan; with counts it is an all-reduced sum.

    With counts, N is unknown when backward starts. The loss then carries n_i * W / N_ref, with N_ref of the last step.
    After backward, before the user's unscale or clipping, gradients are multiplied by N_ref / N.

    A batch may have several losses, one after another or in one sum. Those after the first wait for their own N. The
    first loss's gradient alone is then multiplied by N_ref / N, as it enters its backward pass.
    """

    def __init__(self, group: dist.ProcessGroup | None, accumulate: int, ranks: Ranks = ALONE) -> None:
        self.group, self.accumulate, self._ranks = group, accumulate, ranks
        self.workers = 1 if group is None else dist.get_world_size(group)
        self.applied: float | Tensor | None = None  # to the first loss of the current batch
        self._several = False  # further losses of the batch have their own counts
        self.weighting = "hook"
        self.required = False  # the loop weights its losses by `Controller.weight`
        self.given = False  # losses carry their weights without the controller
        self._model: nn.Module | None = None
        self._counts_group: dist.ProcessGroup | None = None
        self.held: float | Tensor = 1.0  # accumulated gradient of this rank's pieces, divided by its mean
        self._reference: Tensor | None = None
        self._own: Tensor | None = None  # counts of this rank's pieces so far, if shares are cut into pieces
        self._counted: list[tuple[Tensor, Any]] = []

    def bind(self, model: nn.Module, weighting: str) -> None:
        """Use `model`, which `wrap` connects; its losses carry weights as `weighting` says."""
        self._model, self.weighting = model, weighting
        self.required, self.given = weighting == "loss", weighting == "given"

    def in_gradient(self, piece: Piece) -> float | Tensor | None:
        """This rank's accumulated gradient / its mean; NaN: unknown; None: the hook must apply the weight."""
        if self.given:
            return piece.share * (piece.number + 1) / piece.of * self.workers / piece.round.samples
        return None if self.applied is None else math.nan if self._several else self.held

    def require_fit(self, piece: Piece, placeholder: Any, named: dict[str, Any], fail: Callable[[str], Any]) -> None:
        """A forward pass of `piece` begins, with these `named` arguments; call `fail` if it does not fit `weighting`.

        placeholder   converts a batch for a share of zero samples, if the loop has set it
        """
        if not self.given:
            if named.get("num_items_in_batch") is None:
                return
            why = "the model divides its loss by num_items_in_batch, so the loss carries its weight already"
            fail(f"{why}: write controller.wrap(..., weighting='given'), or take dynamix.integrations.transformers")
        if placeholder is not None or piece.round.counts.all():
            return
        why = "some rank has no samples in this step, and a loss with weighting='given' would count its placeholder"
        fail(f"{why}: mask its labels, controller.loader(..., placeholder=lambda batch: ...)")

    def in_loss(self, piece: Piece) -> float:
        """A loss as the loop reports it, divided by its mean."""
        return piece.samples * self.workers / piece.round.samples if self.given else 1.0

    def sum_async(self, values: Tensor) -> Any:
        """Start to sum `values` in place over workers. Returns a handle with `wait()`. A collective call.

        `wait()` raises the error with which another rank ends the job, and `WorkerLostError` if a rank is lost.
        """
        if self.group is None:
            return SimpleNamespace(wait=lambda: None)
        if values.device.type == "cpu" and self._counts_group is None:
            self._counts_group = new_gloo_group(dist.get_process_group_ranks(self.group))
        group = self._counts_group if values.device.type == "cpu" else self.group
        work = dist.all_reduce(values, group=group, async_op=True)
        return SimpleNamespace(wait=functools.partial(self._ranks.wait, work, "the ranks could not add their counts"))

    def apply(self, loss: Tensor, piece: Piece, count: float | Tensor | None) -> Tensor:
        """The weighted loss of this micro-batch, or one of its losses; see `Controller.weight`."""
        if self.given:
            twice = "wrap(weighting='given') says that losses carry their weights, so weight() would weight them twice"
            raise UsageError(f"{twice}: call loss.backward(), or wrap(..., weighting='loss')")
        first = self.applied is None
        if not first and _carries_weight(loss):
            raise UsageError("weight() was given a loss that it has weighted already: weigh each loss of a batch once")
        if count is not None:
            if not isinstance(count, Tensor) and not count >= 0:
                raise ConfigError("count", count, "0 or more", "pass the divisor of this mean loss")
            given = torch.as_tensor(count, dtype=torch.float64)  # on its own device, even on an idle rank
            given = given if piece.samples else torch.zeros_like(given)
            share = self._weight_of(loss, piece, given) if first else self._further_weight(piece, given)
            weight: float | Tensor = share
            weighted = loss * share.to(loss.dtype).to(loss.device)
        else:
            weight = piece.samples * self.workers * self.accumulate / piece.round.samples
            weighted = loss * weight
        node: Any = weighted.grad_fn
        if node is not None:
            node.metadata[_WEIGHED] = True
        if first:
            self.applied = weight if piece.samples else 0.0
            self.held = self.applied + self.held if piece.by_size and piece.number else self.applied
        return weighted

    def _weight_of(self, loss: Tensor, piece: Piece, given: Tensor) -> Tensor:
        """The weight of a batch's first loss, with the expected N."""
        reference = self._sum_of_counts(piece, given)
        if piece.last:
            counted, self._counted = self._counted, []
            self._correct_after(loss, reference, counted)
        return given * self.workers / reference

    def _further_weight(self, piece: Piece, given: Tensor) -> Tensor:
        """The weight of a further loss of a batch."""
        if piece.of > 1:
            one = "with accumulate= or micro_batch=, weight(count=...) is allowed once for each batch"
            raise UsageError(f"{one}: add its losses up first, or leave both out")
        self._several, total = True, given.detach().clone()
        self.sum_async(total).wait()
        return given * self.workers / torch.where(total > 0, total, 1.0)

    def _sum_of_counts(self, piece: Piece, count: Tensor) -> Tensor:
        """Start to sum `count` over workers. Returns the expected sum, from which the gradient is corrected later."""
        while piece.number == 0 and self._counted:  # left from an aborted accumulation
            self._counted.pop(0)[1].wait()
        if piece.by_size:  # ranks run different numbers of pieces, so counts are summed once, with the last
            self._own = count if piece.number == 0 or self._own is None else self._own + count
            if piece.last:
                self._begin_sum(self._own)
            return torch.tensor(float(piece.round.samples), dtype=count.dtype, device=count.device)
        total, handle = self._begin_sum(count)
        if self._reference is None or (piece.number == 0 and self._reference.device != total.device):
            handle.wait()
            self._reference = torch.where(total > 0, total, 1.0)
        return self._reference

    def _begin_sum(self, count: Tensor) -> tuple[Tensor, Any]:
        """Start to sum `count` over workers, for the correction at the round's end."""
        total = count.detach().clone()
        self._counted.append((total, self.sum_async(total)))
        return self._counted[-1]

    def _correct_after(self, loss: Tensor, reference: Tensor, counted: list[tuple[Tensor, Any]]) -> None:
        def at_end() -> None:
            # Queue again, to run after the callbacks with which DDP and FSDP finish the gradients.
            Variable._execution_engine.queue_callback(lambda: self._correct(reference, counted))

        def begin(gradient: Tensor) -> Tensor | None:
            if self._several:
                return gradient * self._correction(reference, counted).to(gradient.dtype).to(gradient.device)
            Variable._execution_engine.queue_callback(at_end)
            return None

        loss.register_hook(begin)

    def _correct(self, reference: Tensor, counted: list[tuple[Tensor, Any]]) -> None:
        factor = self._correction(reference, counted)
        with torch.no_grad():
            for gradient in gradients_of(self._model) if self._model is not None else ():
                gradient.mul_(factor.to(gradient.dtype).to(gradient.device))

    def _correction(self, reference: Tensor, counted: list[tuple[Tensor, Any]]) -> Tensor:
        """N_ref / N. Waits for N."""
        for _, handle in counted:
            handle.wait()
        total = torch.stack([value for value, _ in counted]).mean()
        total = torch.where(total > 0, total, reference)  # no worker counted anything: gradients are zero
        self._reference = total
        return reference / total

    def close(self) -> list[dist.ProcessGroup]:
        """Release the group for counts, and return it."""
        group, self._counts_group, self._model = self._counts_group, None, None
        self._counted.clear()
        return [] if group is None else [group]

    def take(self) -> float | Tensor | None:
        """At the end of a micro-step: the applied weight, None without one. Raises if a weight was required."""
        if self.required and self.applied is None:
            fix = "call controller.weight(loss).backward() instead of loss.backward()"
            raise UsageError(f"wrap(weighting='loss') was chosen, but this batch's loss was not weighted: {fix}")
        applied, self.applied, self._several = self.applied, None, False
        return 1.0 if self.given else applied


def _carries_weight(loss: Tensor) -> bool:
    """Whether `loss` was made from a weighted loss, as far as the last nodes of its graph show."""
    nodes: list[Any] = [loss.grad_fn]
    for node in nodes:
        if node is not None:
            if _WEIGHED in node.metadata:
                return True
            nodes += [before for before, _ in node.next_functions if before not in nodes]
            del nodes[_NODES:]
    return False
