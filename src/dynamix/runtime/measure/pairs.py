"""Estimates one worker's gradient noise scale from consecutive gradients."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dynamix.runtime.measure.recorder import Recorder


class ConsecutiveNoise:
    """The noise scale of a single worker, from pairs of consecutive gradients g, h of b samples each.

    S = b |g - h|^2 / 2 and G2 = g.h, if the parameters had not changed between the two; so a slight overestimate. Keeps
    one copy of the gradients. Results stay on the device; nothing synchronises.

    every   only the first two of this many gradients are used
    """

    def __init__(self, every: int = 2) -> None:
        self.every, self._seen = every, 0
        self._previous: tuple[list[Tensor], float, list[bool]] | None = None

    def observe(self, gradients: Sequence[Tensor | None], batch: float) -> tuple[Tensor, Tensor] | None:
        """(S, G2) as 0-dim tensors if two successive calls had the same batch; otherwise None.

        `gradients` are of the same parameters at every call; None: this parameter has no gradient now.
        """
        number, self._seen = self._seen % self.every, self._seen + 1
        if number > 1:
            return None
        before, self._previous = self._previous, None
        there = [g is not None for g in gradients]
        given = [torch.view_as_real(g) if g.is_complex() else g for g in gradients if g is not None]
        if before is None or before[1:] != (batch, there):
            self._previous = ([g.detach().clone() for g in given], batch, there)
            self._seen -= number  # compare the next gradient with this one
            return None
        apart = torch.stack([(g - h).float().square().sum() for g, h in zip(given, before[0], strict=True)]).sum()
        along = torch.stack([(g * h).float().sum() for g, h in zip(given, before[0], strict=True)]).sum()
        return batch * apart / 2, along


class PairNoise:
    """Applies `ConsecutiveNoise` to the gradients that an optimizer is about to apply, and records it in `recorder`."""

    def __init__(self, recorder: Recorder, every: int) -> None:
        self._recorder, self._pairs = recorder, ConsecutiveNoise(every)
        self._batch: object = None

    def observe(self, parameters: list[nn.Parameter], samples: int, batch: object) -> None:
        """Gradients of `samples` samples of `batch` are ready. Of a batch's several updates only the first counts."""
        if batch is self._batch:
            return
        self._batch = batch
        gradients = [None if p.grad is None or p.grad.is_sparse else p.grad for p in parameters]
        if all(g is None for g in gradients):  # a closure computes gradients inside the step
            return
        if pair := self._pairs.observe(gradients, float(samples)):
            self._recorder.add("pair_noise", pair[0])
            self._recorder.add("pair_signal", pair[1])
