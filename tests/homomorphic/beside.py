"""Training whose every bucket is reduced in dense fixed point as well."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dynamix.compression import CompressionState, compression_hook


class Copied:
    """A bucket again, so that another state can reduce it."""

    def __init__(self, bucket: Any) -> None:
        self._flat, self.index, self.parameters = bucket.buffer().clone(), bucket.index, bucket.parameters
        self.is_last = bucket.is_last

    def buffer(self) -> Tensor:
        return self._flat


def beside_fixed(
    net: Any, state: CompressionState, equal: list[bool], due: Callable[[], bool] = lambda: True
) -> Callable[[Any, Any], Any]:
    """A hook that reduces with `state` and notes, where it is due, whether fixed point gives the same bits."""
    fixed = CompressionState("fixed", model=net)

    def hook(_: Any, bucket: Any) -> Any:
        if not due():
            return compression_hook(state, bucket)
        wanted = fixed.reduce(Copied(bucket))  # type: ignore[arg-type]

        def compare(found: Any) -> Tensor:
            value: Tensor = found.value()
            equal.append(torch.equal(value, wanted.wait()))
            return value

        return compression_hook(state, bucket).then(compare)

    hook.__annotations__.clear()
    return hook


def words_of(rank: int, step: int, words: int = 300) -> Tensor:
    """A batch of four samples of three words."""
    return torch.randint(0, words, (4, 3), generator=torch.Generator().manual_seed(1000 * step + rank))
