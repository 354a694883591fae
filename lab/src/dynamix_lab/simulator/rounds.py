"""What a simulated cluster needs to know of a round of local steps."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dynamix.window import Ints


@dataclass(frozen=True, slots=True)
class RoundApart:
    """A round of one cluster's workers, each of which takes optimizer steps of its own.

    pieces          for every worker the samples of each of its steps; none for an idle worker
    payload_bytes   that each worker sends when parameters are averaged
    gradient_bytes  of an exchange of gradients, to which the cluster's exchange time refers

    >>> [batch.tolist() for batch in RoundApart(((4, 8), (8,), ()), 100, 100).batches()]
    [[[4, 8, 0]], [[8, 0, 0]]]
    """

    pieces: Sequence[Sequence[int]]
    payload_bytes: int
    gradient_bytes: int

    @property
    def bytes_ratio(self) -> float:
        """The bytes of the averaging over those of an exchange of gradients."""
        return self.payload_bytes / max(self.gradient_bytes, 1)

    def batches(self) -> Iterator[Ints]:
        """(1, W) samples of the workers' first steps, of their second ones, and so on; 0 if a worker has none."""
        for sizes in itertools.zip_longest(*self.pieces, fillvalue=0):
            yield np.array([sizes], dtype=np.int64)
