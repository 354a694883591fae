"""Reads a micro-batch's loss and accuracy from whatever the training loop passes. Reading never raises."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

Value = Tensor | float  # a float if reading it was free

# argmax over a large vocabulary is too expensive: 91 ms for 2048 x 32000 logits on a CPU
ACCURACY_ROWS = 256
ACCURACY_ELEMENTS = 2**20
_LOSS = ("loss",)
_LOGITS = ("logits", "out", "output", "outputs", "predictions", "preds")
_TARGET = ("labels", "label", "target", "targets", "y")
_FIX = {
    "loss": "pass a number or a tensor of one element",
    "accuracy": "pass logits (B, C), (B, C, ...) or (B, ..., C), with class indices, one-hot or soft targets",
}


class Reader:
    """Reads the arguments of `Controller.step`. A value that it cannot read is None, counted in `unread`, and warned
    about once.

    loss      a number, a tensor (the mean of its elements), or an object with a field `loss`
    logits    a tensor, or a dict, model output or tuple that contains one. Classes in dimension 1: (B, C), (B, C, ...),
              or in the last one: (B, ..., C)
    target    class indices, of the logits' shape without the classes; indices below 0 or above the last class are
              masked, like `ignore_index`. Or one-hot rows or probabilities, of the logits' shape, a row of zeros
              masked. Or 0 and 1 for a single logit
    If both dimensions could be the classes (as many positions as classes), the reader takes the one of earlier
    unambiguous batches; else the one whose cross-entropy is the loss; else the last.
    """

    def __init__(self) -> None:
        self.unread = 0
        self._warned: set[str] = set()
        self._settled: dict[int, int] = {}  # number of the logits' dimensions -> the dimension of the classes

    def loss(self, given: Any) -> Value | None:
        """The mean loss; None if none was given or it cannot be read."""
        try:
            return None if given is None else _loss(given)
        except Exception as error:
            self.failed("loss", f"{_shown(given)} ({error})")
            return None

    def accuracy(self, logits: Any, target: Any, loss: Value | None = None) -> Value | None:
        """Fraction of positions whose largest logit is the target's, in at most `ACCURACY_ROWS` samples.

        None if it cannot be read; NaN if no target is a class.
        """
        try:
            return self._accuracy(_tensor(logits, _LOGITS), _tensor(target, _TARGET), loss)
        except Exception as error:
            self.failed("accuracy", f"logits {_shown(logits)} and target {_shown(target)} ({error})")
            return None

    def failed(self, what: str, why: str) -> None:
        """Count that `what` could not be read, and warn the first time."""
        self.unread += 1
        if what not in self._warned:
            self._warned.add(what)
            text = f"controller.step() cannot read the {what}: {why}. It is recorded as unknown (NaN); training goes on"
            warnings.warn(f"{text}. To give one: {_FIX[what]}", RuntimeWarning, stacklevel=5)

    def _accuracy(self, logits: Tensor, target: Tensor, loss: Value | None) -> Value:
        logits, target = logits.detach(), target.detach()
        if target.dtype is torch.int64 and logits.shape[:-1] == target.shape and target.dim() == 1 < logits.shape[-1]:
            return _share_right(*_sampled(logits, target, 1))  # the usual case
        if logits.dim() and target.dim() == logits.dim() - 1 and logits.shape[1:2] == (1,):
            logits = logits.squeeze(1)  # (B, 1) with (B,): a single logit
        if logits.shape == target.shape:
            return self._same_shape(logits, target)
        if target.is_floating_point() or target.is_complex():
            raise ValueError("targets that are no class indices have the shape of the logits")
        if target.dim() == logits.dim() and 1 in (target.shape[1], target.shape[-1]):
            target = target.squeeze(1 if target.shape[1] == 1 else -1)
        choices = [d for d in _class_dimensions(logits) if logits.shape[:d] + logits.shape[d + 1 :] == target.shape]
        if not choices and logits.dim() > 1 and target.numel() * logits.shape[-1] == logits.numel():
            logits, target = logits.reshape(-1, logits.shape[-1]), target.reshape(-1)
            choices = [1]
        if not choices:
            raise ValueError("their shapes do not go together")
        if len(choices) == 1:
            self._settled[logits.dim()] = choices[0]
        if (classes := self._settled.get(logits.dim())) is not None:
            return _share_right(*_sampled(logits, target, classes))
        return _by_loss(logits, target, loss)

    def _same_shape(self, logits: Tensor, target: Tensor) -> Value:
        if logits.dim() == 0:
            raise ValueError("a single number has no classes")
        choices = _class_dimensions(logits)
        if logits.dim() == 1 or all(logits.shape[d] == 1 for d in choices):
            logits, target = logits.flatten()[:ACCURACY_ELEMENTS], target.flatten()[:ACCURACY_ELEMENTS]
            binary = ((target == 0) | (target == 1)).all()
            return _read(torch.where(binary, ((logits > 0) == (target == 1)).float().mean(), math.nan))
        (best, certain), *other = [_share_right_of_soft(logits, target, d) for d in choices if logits.shape[d] > 1]
        for share, classes in other:
            best = torch.where(classes > certain, share, best)
        return _read(best)


def _loss(given: Any) -> Value:
    if isinstance(given, (int, float)):
        return float(given)
    value = _tensor(given, _LOSS)
    if not value.numel() or value.is_complex():
        raise ValueError("it has no real elements")
    return _read(value.detach().reshape(()) if value.numel() == 1 else value.detach().to(torch.float32).mean())


def _tensor(given: Any, names: Sequence[str]) -> Tensor:
    """The tensor in `given`: itself, a field of one of these `names`, or the first in a tuple that has a dimension."""
    if isinstance(given, Tensor):
        return given
    for name in names:
        held = given.get(name) if isinstance(given, Mapping) else getattr(given, name, None)
        if held is not None and not callable(held):
            return _tensor(held, names)
    if isinstance(given, Mapping):
        raise ValueError(f"it has none of the keys {', '.join(names)}")
    if isinstance(given, (tuple, list)) and any(isinstance(part, Tensor) for part in given):
        return next(part for part in given if isinstance(part, Tensor) and part.dim() >= (0 if names is _LOSS else 1))
    return torch.as_tensor(given)


def _class_dimensions(logits: Tensor) -> list[int]:
    """The dimensions that may be the classes: the last, or 1."""
    last = logits.dim() - 1
    return [last, 1] if last > 1 else [last] if last >= 0 else []


def _sampled(logits: Tensor, target: Tensor, classes: int) -> tuple[Tensor, Tensor, int]:
    """A part of the samples of both, with positions spread over the whole range; views."""
    if classes == 0:
        return logits, target, classes
    rows = max(ACCURACY_ELEMENTS // max(logits.shape[classes], 1), 1)
    if logits.dim() > 2:  # fewer samples, because positions are sampled, too
        rows = math.ceil(math.sqrt(rows))
    rows = min(ACCURACY_ROWS, rows)
    if len(logits) > rows:
        logits, target = logits[:rows], target[:rows]
    too_many = -(-logits.numel() // ACCURACY_ELEMENTS)
    for dimension in range(1, logits.dim()):
        if dimension == classes or too_many <= 1:
            continue
        every = min(too_many, logits.shape[dimension])
        too_many = -(-too_many // every)
        logits = logits[_every(dimension, every)]
        same = target.dim() == logits.dim() or dimension < classes
        target = target[_every(dimension if same else dimension - 1, every)]
    return logits, target, classes


def _every(dimension: int, step: int) -> tuple[slice, ...]:
    return (*[slice(None)] * dimension, slice((step - 1) // 2, None, step))


def _share_right(logits: Tensor, target: Tensor, classes: int) -> Value:
    """The fraction of class indices that is predicted correctly."""
    known = type(logits) is type(target) is Tensor and logits.dtype in (torch.float32, torch.float64)
    if known and logits.is_cpu and target.is_cpu and target.dtype is torch.int64:
        # NumPy avoids torch's cost per call.
        right = int(np.count_nonzero(logits.numpy().argmax(classes) == target.numpy()))
        seen = int(np.count_nonzero(target.numpy().view(np.uint64) < logits.shape[classes]))  # negative: very large
        return right / seen if seen else math.nan
    valid = (target >= 0) & (target < logits.shape[classes])
    return _read(torch.count_nonzero((logits.argmax(classes) == target) & valid) / torch.count_nonzero(valid))


def _share_right_of_soft(logits: Tensor, target: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Of probabilities or one-hot rows: the correct fraction, and the fraction of such rows; NaN if some are not."""
    logits, target, _ = _sampled(logits, target, classes)
    target = target.to(torch.float32)
    total = target.sum(classes)
    one = (total - 1.0).abs() < 0.01
    fit = (one | (total == 0)).all() & (target >= 0).all()
    right = torch.count_nonzero((logits.argmax(classes) == target.argmax(classes)) & one)
    share = torch.where(fit, right / torch.count_nonzero(one), math.nan)
    return share, torch.where(fit, one.float().mean(), 0.0)


def _by_loss(logits: Tensor, target: Tensor, loss: Value | None) -> Value:
    """If both the last dimension and dimension 1 could be the classes: the last, unless the loss indicates 1."""
    last, first = (_sampled(logits, target, d) for d in (logits.dim() - 1, 1))
    if loss is None:
        return _share_right(*last)
    apart = [(_cross_entropy(*choice) - loss).abs() for choice in (last, first)]
    tells = (apart[1] < apart[0]) & (apart[1] < 0.1 * torch.as_tensor(loss).abs())
    of_first, of_last = (torch.as_tensor(_share_right(*choice), device=logits.device) for choice in (first, last))
    return _read(torch.where(tells, of_first, of_last))


def _cross_entropy(logits: Tensor, target: Tensor, classes: int) -> Tensor:
    known = torch.where((target >= 0) & (target < logits.shape[classes]), target, -1).long()
    return cross_entropy(logits.float().movedim(classes, 1), known, ignore_index=-1)


def _read(value: Tensor) -> Value:
    return value if value.is_cuda else float(value.item())


def _shown(given: Any) -> str:
    if isinstance(given, Tensor):
        return f"of shape {tuple(given.shape)} and {given.dtype}"
    return f"a {type(given).__name__}"
