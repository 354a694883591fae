"""The stigmergic rule with some of its traces removed, and its numbers learned again for that."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from dynamix.policies.stigmergic.policy import Parameters, StigmergicPolicy
from dynamix.policies.stigmergic.traces import Own, TraceKind
from dynamix.policies.stigmergic.worker import Sense
from dynamix.window import Bounds, Floats, Ints
from dynamix_lab.training.stigmergic import SearchConfig, train

Rule = Callable[[Parameters], StigmergicPolicy]


class Impaired(StigmergicPolicy):
    """Workers that leave fewer traces, or read them with errors.

    without   traces that are not left
    noise     standard deviation of the logarithm of what every worker reads of every trace
    late      windows after which traces are read; until then they are unknown
    """

    def __init__(
        self,
        parameters: Parameters,
        *,
        without: Sequence[TraceKind] = (),
        noise: float = 0.0,
        late: int = 0,
        seed: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(parameters, **options)
        self.without, self.noise, self.late = list(without), noise, late
        self._rng = np.random.default_rng([seed, 57])
        self._on_the_way: deque[Floats] = deque()

    def observe(self, own: Own) -> tuple[Sense, Floats]:
        sense, left = super().observe(own)
        left[..., self.without] = 0.0
        return sense, left

    def choose(self, own: Own, sense: Sense, traces: Floats, bounds: Bounds) -> Ints:
        self._on_the_way.append(traces)
        traces = self._on_the_way.popleft() if len(self._on_the_way) > self.late else np.full(traces.shape, np.nan)
        if self.noise:
            traces = traces * np.exp(self.noise * self._rng.normal(size=(*own.size.shape, len(TraceKind))))
        return super().choose(own, sense, traces, bounds)


ABLATIONS: dict[str, Rule] = {
    "whole": StigmergicPolicy,
    "no-traces": partial(StigmergicPolicy, shared=False),
    "no-noise-trace": partial(Impaired, without=(TraceKind.NOISE, TraceKind.HEARD)),
    "noise": partial(Impaired, noise=0.1),
    "late": partial(Impaired, late=1),
}
"""Rules by name. Each impairs one thing, except `whole`, which shows the effect of learning again alone.

Without traces a worker still has a noise scale, from its own gradient and the mean gradient. If traces are read late,
the others' last choice arrives a window late, so a worker mistakes a change of all workers for its own error.
"""


@dataclass(frozen=True, slots=True)
class Learning:
    """How an ablation's numbers are learned: the shipped recipe with fewer generations, the same for all.

    generations, tried   as in `SearchConfig`
    """

    generations: tuple[int, ...] = (2, 4, 4, 4)
    tried: int = 20

    def learned(self, name: str, tell: Callable[[str, float], None]) -> StigmergicPolicy:
        """The ablation's numbers that are best on validation clusters, no worse than those set by hand."""
        recipe = SearchConfig(generations=self.generations, tried=self.tried)
        return train(recipe, rule=ABLATIONS[name], progress=tell)
