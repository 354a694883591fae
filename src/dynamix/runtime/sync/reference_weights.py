"""What the moves of workers that step apart are counted from: a tensor of the model as it was at the last meeting."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ReferenceWeights:
    """A parameter or buffer, and what it was at the last meeting.

    name      of a buffer in its model, so that it is found again where a pass puts another tensor in its place
    version   of the tensor's content then, as autograd counts its changes
    mean      of the workers' moves, while a meeting lasts; in float32 at least
    """

    mean: Tensor

    def __init__(self, tensor: Tensor, name: str = "") -> None:
        self.tensor, self.value, self.version = tensor, tensor.detach().clone(), tensor._version
        self.name = name
        self.is_parameter = isinstance(tensor, nn.Parameter)

    def follow(self, tensor: Tensor) -> None:
        """A pass has put `tensor` in the place of the buffer; moves are counted from what was there, if it fits."""
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

    def move(self) -> Tensor:
        """How far the tensor is from there, in float32 at least."""
        wide = torch.promote_types(self.value.dtype, torch.float32)
        return self.tensor.detach().to(wide) - self.base(wide)

    def base(self, dtype: torch.dtype) -> Tensor:
        """What a move is added to: an infinite entry of a buffer (a mask, a least value so far) moves from zero."""
        value = self.value.to(dtype)
        return value if self.is_parameter or value.is_complex() else value.nan_to_num(0.0, 0.0, 0.0)
