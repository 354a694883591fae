"""Who weighs how much in a mean of models that share some of their past and not the rest."""

from __future__ import annotations

import numpy as np

from dynamix.window import Floats, Ints


def weights(ledgers: Ints) -> Floats:
    """Of n models in their mean, (n,), adding up to 1: by the samples that not all of them have in common.

    ledgers   samples of each of W workers that a model was trained on (n, W)

    What several models hold counts once, in equal parts. So after an ordinary round each weighs by its own samples, and
    where two halves of a network meet again each half by what it has trained apart.

    >>> weights(np.array([[30, 0], [0, 10]])).tolist()
    [0.75, 0.25]
    >>> weights(np.array([[60, 0, 0], [60, 0, 0], [0, 0, 20]])).tolist()  # the first two have met
    [0.375, 0.375, 0.25]
    """
    levels = np.sort(ledgers, axis=0)
    holders = len(ledgers) - np.arange(len(ledgers))
    shares = np.cumsum(np.diff(levels, axis=0, prepend=levels[:1]) / holders[:, None], axis=0)
    credit = np.zeros(len(ledgers))
    for worker in range(ledgers.shape[1]):
        place = np.searchsorted(levels[:, worker], ledgers[:, worker], side="right") - 1
        credit += shares[place, worker]
    total = credit.sum()
    return credit / total if total > 0 else np.full(len(ledgers), 1.0 / len(ledgers))
