"""Detects samples of a batch that never reached the model, if the model's inputs are too short."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from dynamix.runtime.facts.losses import nodes_before, shapes_of, walk

_FIX = (
    "if the loss is over the n samples left, write wrap(..., weighting='loss') and "
    "controller.weight(loss, count=n).backward(); if it is a mean over all N = {0}, write controller.step(count=N)"
)


def samples_lost(mine: int, found: int, loss: Any) -> str | None:
    """The message if a batch has `mine` samples, but its passes had only `found` rows; None if nothing is wrong.

    If `found` divides `mine`, the loop may train the same part of every batch. If the loss's graph shows `mine` rows,
    it may train on distinct inputs only, and repeat their outputs.
    """
    if not mine or mine % found == 0 or any(rows % mine == 0 for rows in _rows_of(loss)):
        return None
    return f"the model got {found} of {mine} samples, but their weight would be that of {mine}: {_FIX.format(mine)}"


def may_hold(inputs: Any, samples: int) -> bool:
    """Whether some dimension of the tensors in `inputs` is `samples`, or `inputs` holds an object of unknown type.

    >>> import torch
    >>> may_hold([torch.zeros(2, 3), {"mask": torch.zeros(4)}, 5], 4), may_hold([torch.zeros(2, 3), "a"], 4)
    (True, False)
    """
    if isinstance(inputs, Tensor) and not inputs.is_nested:
        return samples in inputs.shape
    if isinstance(inputs, Mapping):
        inputs = [*inputs.values()]
    if isinstance(inputs, list | tuple):
        return any(may_hold(value, samples) for value in inputs)
    return not isinstance(inputs, bool | int | float | str | None)


def _rows_of(loss: Any) -> list[int]:
    """Row counts of the tensors that were reduced to the number `loss`; none if its graph is unknown."""
    nodes = walk(getattr(loss, "grad_fn", None), lambda node: [] if shapes_of(node, 1) else nodes_before(node))
    return [shape[0] for node in nodes for shape in shapes_of(node, 1)]
