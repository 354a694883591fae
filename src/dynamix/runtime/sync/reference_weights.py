"""Reference weights: a copy of each tensor of the model as of the last averaging. Local steps are measured as moves
from it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


class ReferenceWeights:
    """A parameter or buffer, and its value at the last averaging.

    name      of an untrained tensor in its model, to find it again if a pass replaces it
    version   autograd's change counter of the tensor at that time
    """

    def __init__(self, tensor: Tensor, name: str = "") -> None:
        self.tensor, self.value, self.version = tensor, tensor.detach().clone(), tensor._version
        self.name = name

    @property
    def is_trained(self) -> bool:
        """Whether it is a trained parameter, not a buffer or a tensor that only the loop changes."""
        return isinstance(self.tensor, nn.Parameter) and self.tensor.requires_grad

    def follow(self, tensor: Tensor) -> None:
        """A pass has replaced it by `tensor`; moves still count from the old value, if the shapes and types match."""
        self.tensor = tensor
        if (tensor.shape, tensor.dtype) != (self.value.shape, self.value.dtype):
            self.value = torch.zeros_like(tensor, requires_grad=False)

    def keep(self) -> None:
        """Count moves from the tensor's present value."""
        self.value.copy_(self.tensor.detach())
        self.version = self.tensor._version

    def take(self, agreed: Tensor) -> None:
        """Set the tensor and the reference to `agreed`."""
        self.tensor.copy_(agreed)
        self.keep()

    def go(self, move: Tensor) -> None:
        """Set both to the reference plus `move`."""
        self.take(self.base(torch.promote_types(self.value.dtype, move.dtype)) + move)

    def show(self, move: Tensor) -> None:
        """Set the negative `move` as the gradient of `value`, for an outer optimizer."""
        self.value.grad = move.neg().to(self.value.dtype)

    def move(self) -> Tensor:
        """The tensor's difference from the reference, at least in float32."""
        wide = torch.promote_types(self.value.dtype, torch.float32)
        return self.tensor.detach().to(wide) - self.base(wide)

    def base(self, dtype: torch.dtype) -> Tensor:
        """The value from which moves count: zero for an infinite entry of a buffer (a mask, a least value)."""
        value = self.value.to(dtype)
        return value if self.is_trained or value.is_complex() else value.nan_to_num(0.0, 0.0, 0.0)


class Untrained:
    """Untrained parameters of `model` that nothing has changed so far; without those of tensor subclasses.

    They may be large, so there are no copies: only a few entries, and autograd's change counter.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.moving: dict[str, None] = {}  # names of those that a loop was seen to change; no longer checked
        self.seen: dict[str, _Seen] = {}  # those to check
        self._looks = 0

    def look(self) -> None:
        """A round begins: detect changes from now on."""
        kept, self.seen = self.seen, {}
        for name, p in self.model.named_parameters():
            if not p.requires_grad and type(p) is nn.Parameter and name not in self.moving:
                before = kept.get(name)
                self.seen[name] = _Seen(p) if before is None or before.changed(p) else before

    def moved(self) -> dict[str, bool]:
        """Whether each has changed since. Entries, which are read from the device, are compared ever more rarely."""
        self._looks += 1
        due, now = self._looks & (self._looks - 1) == 0, dict(self.model.named_parameters())
        return {name: seen.changed(now.get(name, seen.tensor), surely=due) for name, seen in self.seen.items()}

    def let_go(self, names: Iterable[str]) -> None:
        """Some rank has changed these."""
        self.moving |= dict.fromkeys(names)

    def travelling(self) -> dict[str, nn.Parameter]:
        """Those that were seen to change, by name."""
        return {name: p for name, p in self.model.named_parameters() if name in self.moving}


class _Seen:
    """A parameter's earlier state: `few` of its entries, and autograd's change counter."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.version, self.memory, self.few = tensor, tensor._version, tensor.data_ptr(), _few(tensor)

    def changed(self, tensor: Tensor, *, surely: bool = False) -> bool:
        """Whether `tensor` is another one, or is known to have changed.

        Autograd does not count changes such as `tensor.data.mul_(2)`, so only entries show them. They are compared if
        the tensor has moved in memory, or with `surely`.
        """
        if tensor is not self.tensor or tensor._version != self.version:
            return True
        looks = surely or tensor.data_ptr() != self.memory
        return looks and not torch.equal(_few(tensor).to(self.few.device), self.few)


def _few(tensor: Tensor) -> Tensor:
    """A copy of some entries, as bytes, because not all types can be compared."""
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // 16)].clone().view(torch.uint8)
