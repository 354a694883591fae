"""The gradient of the union batch, computed share by share in one process, with each worker's own observations."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from dynamix.errors import ConfigError
from dynamix.runtime.measure.readings import ACCURACY_ROWS

Indices = Sequence[int]
Load = Callable[[Indices], tuple[Any, Any]]


@dataclass(frozen=True, slots=True)
class ShareSeen:
    """One worker's observations of its share, or of a piece of it.

    samples         in it
    loss            mean over them
    norm_sq         |g_i|^2 of its mean gradient, NaN if not requested
    logits, target  the first rows (`ACCURACY_ROWS`), on the CPU; None if one of them is no tensor
    """

    samples: int
    loss: float
    norm_sq: float
    logits: Tensor | None
    target: Tensor | None


class UnionGradient:
    """Leaves sum_i (n_i/N) g_i in the parameters' `.grad`, as the weighted all-reduce of a live job does.

    One backward pass per share gives every worker's own gradient g_i, and so |g_i|^2. All together cost the samples of
    the union batch, and one more copy of the gradients in memory. Buffers (BatchNorm statistics) follow DDP: every
    worker starts from those of worker 0 after the previous step.

    load          indices -> (inputs, targets), already collated
    micro_batch   most samples that pass through the model at once; with BatchNorm a share is never cut, because its
                  statistics are of the whole share
    """

    def __init__(self, model: nn.Module, loss: Callable[[Any, Any], Tensor], load: Load, *, micro_batch: int) -> None:
        self.model, self.loss, self.load, self.micro_batch = model, loss, load, micro_batch
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        if not self.parameters:
            raise ConfigError("model", type(model).__name__, "a model with parameters to train", "set requires_grad")
        self.device = self.parameters[0].device
        self.whole = any(isinstance(module, _BatchNorm) for module in model.modules())

    def __call__(
        self, shares: Sequence[Indices], *, placeholder: Indices = (), norms: bool = True
    ) -> list[list[ShareSeen]]:
        """The workers' observations, empty for shares of zero. `.grad` then holds the union batch's mean gradient.

        norms         whether to measure |g_i|^2
        placeholder   loaded by worker 0 if its share is zero: its forward pass updates the buffers, as live
        """
        total = sum(len(share) for share in shares)
        union: list[Tensor | None] = [None] * len(self.parameters)
        before = kept = self._copy_of_buffers()
        seen: list[list[ShareSeen]] = []
        for rank, share in enumerate(shares):
            if rank:
                self._put_back(before)
            seen.append([self._one(share, norms=norms)] if share else [])
            if share:
                self._add_to(union, len(share) / total)
            elif rank == 0 and before and placeholder:
                with torch.no_grad():
                    self.model(moved(self.load(placeholder), self.device)[0])
            if rank == 0:
                kept = self._copy_of_buffers()
        self._put_back(kept)
        for parameter, gradient in zip(self.parameters, union, strict=True):
            parameter.grad = gradient
        return seen

    def norm_sq(self) -> float:
        """|g|^2 of the present `.grad`, summed in double precision."""
        return squared_norm([p.grad for p in self.parameters if p.grad is not None])

    def _one(self, share: Indices, *, norms: bool) -> ShareSeen:
        for parameter in self.parameters:
            parameter.grad = None
        size = len(share) if self.whole else self.micro_batch
        loss, rows, logits, target = 0.0, 0, list[Tensor](), list[Tensor]()
        for at in range(0, len(share), size):
            chunk = share[at : at + size]
            outputs, targets, value = forward(self.model, self.loss, moved(self.load(chunk), self.device))
            part = len(chunk) / len(share)
            (value * part).backward()
            loss += float(value.item()) * part
            alike = not logits or logits[0].shape[1:] == getattr(outputs, "shape", ())[1:]
            if isinstance(outputs, Tensor) and isinstance(targets, Tensor) and rows < ACCURACY_ROWS and alike:
                logits.append(outputs.detach()[: ACCURACY_ROWS - rows].cpu())
                target.append(targets[: ACCURACY_ROWS - rows].cpu())
                rows += len(logits[-1])
        heads = (torch.cat(logits), torch.cat(target)) if logits else (None, None)
        return ShareSeen(len(share), loss, self.norm_sq() if norms else float("nan"), *heads)

    def _add_to(self, union: list[Tensor | None], weight: float) -> None:
        """Add the gradients of one share in place, so that no third copy is needed."""
        for at, parameter in enumerate(self.parameters):
            gradient, parameter.grad = parameter.grad, None
            if gradient is not None:
                gradient.mul_(weight)
                union[at] = gradient if (so_far := union[at]) is None else so_far.add_(gradient)

    def _copy_of_buffers(self) -> list[Tensor]:
        return [buffer.detach().clone() for buffer in self.model.buffers()]

    @torch.no_grad()
    def _put_back(self, saved: list[Tensor]) -> None:
        for buffer, value in zip(self.model.buffers(), saved, strict=True):
            buffer.copy_(value)


def squared_norm(gradients: Sequence[Tensor]) -> float:
    """Sum of squares over all tensors, each norm in single precision or better; sparse ones count coalesced.

    >>> squared_norm([torch.tensor([3.0]), torch.tensor([[4.0, 0.0]])])
    25.0
    """
    norms = []
    for gradient in gradients:
        values = gradient.detach().coalesce().values() if gradient.is_sparse else gradient.detach()
        norms.append(torch.linalg.vector_norm(values, dtype=torch.promote_types(values.dtype, torch.float32)))
    return float(torch.stack(norms).double().square().sum().item()) if norms else 0.0


def forward(model: nn.Module, loss: Callable[[Any, Any], Tensor], batch: tuple[Any, Any]) -> tuple[Any, Any, Tensor]:
    """Outputs, targets and mean loss of a batch. Raises `ConfigError` if the loss is no mean."""
    inputs, targets = batch
    outputs = model(inputs)
    value = loss(outputs, targets)
    if value.dim() != 0:
        fix = "average over the batch (reduction='mean')"
        raise ConfigError("shape of the loss", tuple(value.shape), "(), one mean", fix)
    return outputs, targets, value


def moved(value: Any, device: torch.device) -> Any:
    """A batch on `device`, of any structure."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, (list, tuple)):
        items = [moved(item, device) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        return {key: moved(item, device) for key, item in value.items()}
    return value
