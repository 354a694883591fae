"""Reference weights: a copy of each tensor of the model as of the last meeting. Workers that step apart count their
moves from it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


class ReferenceWeights:
    """A parameter or buffer, and what it was at the last meeting.

    name      of what is not trained in its model, so that it is found again where a pass puts another in its place
    version   of the tensor's content then, as autograd counts its changes
    """

    def __init__(self, tensor: Tensor, name: str = "") -> None:
        self.tensor, self.value, self.version = tensor, tensor.detach().clone(), tensor._version
        self.name = name

    @property
    def is_trained(self) -> bool:
        """Whether it is a parameter that is trained, and no buffer or what a loop moves by itself."""
        return isinstance(self.tensor, nn.Parameter) and self.tensor.requires_grad

    def follow(self, tensor: Tensor) -> None:
        """A pass has put `tensor` in its place; moves are counted from what was there, if it fits."""
        self.tensor = tensor
        if (tensor.shape, tensor.dtype) != (self.value.shape, self.value.dtype):
            self.value = torch.zeros_like(tensor, requires_grad=False)

    def keep(self) -> None:
        """Moves are counted from what the tensor is now."""
        self.value.copy_(self.tensor.detach())
        self.version = self.tensor._version

    def take(self, agreed: Tensor) -> None:
        """All go on from `agreed`."""
        self.tensor.copy_(agreed)
        self.keep()

    def go(self, move: Tensor) -> None:
        """All go on from there by `move`."""
        wide = torch.promote_types(self.value.dtype, move.dtype)
        self.take(self.base(wide) + move)

    def show(self, move: Tensor) -> None:
        """Let an outer optimizer of `value` have `move`, turned round, for its gradient."""
        self.value.grad = move.neg().to(self.value.dtype)

    def move(self) -> Tensor:
        """How far the tensor is from there, in float32 at least."""
        wide = torch.promote_types(self.value.dtype, torch.float32)
        return self.tensor.detach().to(wide) - self.base(wide)

    def base(self, dtype: torch.dtype) -> Tensor:
        """The value to which a move is added: an infinite entry of a buffer (a mask, a least value) moves from zero."""
        value = self.value.to(dtype)
        return value if self.is_trained or value.is_complex() else value.nan_to_num(0.0, 0.0, 0.0)


class Untrained:
    """Parameters of `model` that are not trained, and that nobody has moved so far; without those of tensor subclasses.

    There are no copies of them, which may be large: of each a few entries are known, and what autograd counts.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.moving: dict[str, None] = {}  # names of those that a loop was seen to move; they are looked at no more
        self.seen: dict[str, _Seen] = {}  # those that are looked at
        self._looks = 0

    def look(self) -> None:
        """A round begins: whoever changes them from now on moves them."""
        kept, self.seen = self.seen, {}
        for name, p in self.model.named_parameters():
            if not p.requires_grad and type(p) is nn.Parameter and name not in self.moving:
                before = kept.get(name)
                self.seen[name] = _Seen(p) if before is None or before.changed(p) else before

    def moved(self) -> dict[str, bool]:
        """Whether each was moved since. Entries, which the device is asked for, are looked at more and more seldom."""
        self._looks += 1
        due, now = self._looks & (self._looks - 1) == 0, dict(self.model.named_parameters())
        return {name: seen.changed(now.get(name, seen.tensor), surely=due) for name, seen in self.seen.items()}

    def let_go(self, names: Iterable[str]) -> None:
        """Some rank has moved these."""
        self.moving |= dict.fromkeys(names)

    def travelling(self) -> dict[str, nn.Parameter]:
        """Those that were seen to move, by name."""
        return {name: p for name, p in self.model.named_parameters() if name in self.moving}


class _Seen:
    """A parameter as it was: `few` of its entries, and how often autograd knows it to have changed."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.version, self.memory, self.few = tensor, tensor._version, tensor.data_ptr(), _few(tensor)

    def changed(self, tensor: Tensor, *, surely: bool = False) -> bool:
        """Whether `tensor` is another one, or known to have changed.

        If autograd counts nothing, as with `tensor.data.mul_(2)`, only entries tell. They are looked at if the tensor
        is in other memory, or if it is to be known `surely`.
        """
        if tensor is not self.tensor or tensor._version != self.version:
            return True
        looks = surely or tensor.data_ptr() != self.memory
        return looks and not torch.equal(_few(tensor).to(self.few.device), self.few)


def _few(tensor: Tensor) -> Tensor:
    """A copy of some of its entries, as bytes: not all types can be compared."""
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // 16)].clone().view(torch.uint8)
