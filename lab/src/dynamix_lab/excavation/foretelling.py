"""Measures what traces tell: whether somebody laden is coming, of whom an empty agent sees nothing yet.

The motion is by hand. Of every empty agent at the mouth or in the tunnel it is noted what it sees, what it smells of
the paper's traces and of typed ones, and whether somebody laden is ahead in the tunnel, out of sight but at most `FAR`
cells away. A network of the learners' size learns to tell that from each, in some worlds; how well it tells is the area
under its ROC curve in others: 0.5 is chance, 1 always right.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from dynamix_lab.excavation.fading import FadingField
from dynamix_lab.excavation.hand import HandMotion
from dynamix_lab.excavation.learner import perceptron
from dynamix_lab.excavation.world import Excavation, ExcavationConfig, Flags, Seen

FAR = 5
_NOTED_EVERY = 3  # steps: what follows at once is much the same
_EVALUATED = 0.25  # of the worlds


def area_under_roc(score: NDArray[Any], truth: NDArray[np.bool_]) -> float:
    """The chance that one who is true scores higher than one who is not; ties count half.

    >>> area_under_roc(np.array([0.1, 0.4, 0.3, 0.9]), np.array([False, False, True, True]))
    0.75
    """
    _, place, count = np.unique(score, return_inverse=True, return_counts=True)
    rank = (count.cumsum() - (count - 1) / 2)[place]
    yes, no = int(truth.sum()), int((~truth).sum())
    return float((rank[truth].sum() - yes * (yes + 1) / 2) / (yes * no)) if yes and no else float("nan")


def somebody_is_coming(
    task: ExcavationConfig, *, agents: int = 8, worlds: int = 16, steps: int = 1000, updates: int = 600, seed: int = 0
) -> dict[str, float]:
    """The area under the ROC curve without traces, with the paper's ("visits"), and with typed ones."""
    torch.set_num_threads(1)
    task = dataclasses.replace(task, signs="typed")
    env, act = Excavation(task, agents=agents, worlds=worlds, seed=seed), HandMotion(task, seed=seed)
    visits = FadingField(~env.burrow.rock, task.decay, worlds=worlds)
    wide = env.burrow.around(task.smell, centre=True)
    seen, noted, truths, where = env.observe(), [], [], []
    for step in range(steps):
        seen, _, _ = env.step(act(seen))
        visits.fade()
        visits.deposit(env.place)
        if step % _NOTED_EVERY == 0:
            asked, truth = _ahead(env)
            smelt = visits.smelt(env.place[..., None] + wide).astype(np.float32) / 2
            noted.append(np.concatenate([seen, smelt], -1)[asked])
            truths.append(truth[asked])
            where.append(np.nonzero(asked)[0])
    facts, truth, world = np.concatenate(noted), np.concatenate(truths), np.concatenate(where)
    held = world < max(1, round(_EVALUATED * worlds))
    own, all_typed = task.traces.start, task.traces.stop
    parts = {
        "none": np.arange(own),
        "visits": np.r_[np.arange(own), np.arange(all_typed, facts.shape[-1])],
        "typed": np.arange(all_typed),
    }
    return {
        name: area_under_roc(_told(facts[:, columns], truth, ~held, updates, seed)[held], truth[held])
        for name, columns in parts.items()
    }


def _ahead(env: Excavation) -> tuple[Flags, Flags]:
    """Who is asked (B, N): the empty at the mouth or in the tunnel who see nobody laden; and whether one is ahead."""
    b, shape = env.burrow, env.config.shape
    column, middle = b.column[env.place], b.to_face[env.place] == b.columns - 1 - b.column[env.place]
    end = shape.nest_columns + shape.tunnel_length
    way = middle & (column >= shape.nest_columns - 1) & (column < end) & ~env.absent
    laden = way & env.carrying
    apart = column[..., None, :] - column[..., :, None]  # [i, j]: how far j is ahead of i
    same = b.tunnel[env.place][..., None, :] == b.tunnel[env.place][..., :, None]
    near = (same & laden[..., None, :] & (np.abs(apart) <= env.config.sight)).any(-1)
    coming = (same & laden[..., None, :] & (apart > env.config.sight) & (apart <= FAR)).any(-1)
    return way & ~env.carrying & ~near, coming


def _told(facts: Seen, truth: Flags, used: Flags, updates: int, seed: int) -> NDArray[np.float64]:
    """The answers, for all rows, of a network that learned from the rows `used`."""
    generator = torch.Generator().manual_seed(seed)
    net = perceptron(facts.shape[-1], 64, 1, generator)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    inputs, aims = torch.from_numpy(facts), torch.from_numpy(truth).float()
    rows = torch.from_numpy(np.flatnonzero(used))
    for _ in range(updates):
        drawn = rows[torch.randint(len(rows), (256,), generator=generator)]
        loss = nn.functional.binary_cross_entropy_with_logits(net(inputs[drawn]).squeeze(-1), aims[drawn])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        return np.asarray(net(inputs).squeeze(-1).double().numpy())
