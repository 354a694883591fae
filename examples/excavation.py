"""S-MADRL on the excavation task: agents that see little and never talk share a tunnel one cell wide, and some rest.

python examples/excavation.py --watch             # learns in some four minutes on one core; --scale 0.02: a preview
python examples/excavation.py --gif film.gif
python examples/excavation.py --by-hand --watch   # hand-written motion, at once
"""

from __future__ import annotations

import argparse
import dataclasses
import time

import numpy as np
import torch

from dynamix_lab.excavation.gate_search import GateSearch, learn_gate
from dynamix_lab.excavation.ground import GROUNDS
from dynamix_lab.excavation.hand import HandMotion
from dynamix_lab.excavation.lessons import CURRICULUM
from dynamix_lab.excavation.mappo import MAPPOConfig, MAPPOTraining
from dynamix_lab.excavation.render import captioned, image, save_gif, text
from dynamix_lab.excavation.resting import ThresholdConfig, Thresholds
from dynamix_lab.excavation.sharing import gini
from dynamix_lab.excavation.trial import RESTERS
from dynamix_lab.excavation.world import Excavation, ExcavationConfig


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--agents", type=int, default=8)
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of steps to learn from")
    parser.add_argument("--steps", type=int, default=300, help="to watch them work")
    parser.add_argument("--before", type=int, default=0, help="steps before that are not shown")
    parser.add_argument("--by-hand", action="store_true", help="learn nothing")
    parser.add_argument("--watch", action="store_true", help="draw in the terminal")
    parser.add_argument("--gif")
    given = parser.parse_args()
    torch.set_num_threads(1)  # the nets are so small that threads would only wait for each other

    task = ExcavationConfig(GROUNDS["single-file"], signs="typed")
    if given.by_hand:
        act, gate = HandMotion(task), ThresholdConfig()
    else:
        config = MAPPOConfig(traces=True, resters=RESTERS["s-madrl-team"])
        whole = config.rollout
        stages = tuple(
            dataclasses.replace(s, steps=max(1, round(s.steps * given.scale / whole)) * whole) for s in CURRICULUM
        )
        training = MAPPOTraining(task, config, stages=stages, seed=0)
        training.run(progress=lambda stage, part: print(f"{stage}: {part:.0%}", flush=True))
        act = training.act
        search = GateSearch() if given.scale >= 1 else GateSearch(rounds=1, draws=2, kept=2, worlds=1)
        gate = learn_gate(act, dataclasses.replace(task, horizon=max(10, round(1000 * min(given.scale, 1)))), search)

    env = Excavation(task, agents=given.agents, seed=1)
    thresholds, seen, frames = Thresholds(env, gate), env.observe(), []
    for step in range(given.before + given.steps):
        seen, _, _ = env.step(act(seen), resting=thresholds.rest())
        thresholds.after()
        if step < given.before:
            continue
        if given.watch:
            print(f"\x1b[2J\x1b[H{text(env)}\nresting: {int(thresholds.resting.sum())}", flush=True)
            time.sleep(0.08)
        if given.gif:
            said = (
                f"step {env.clock}: {env.delivered.sum()} pellets, {int(thresholds.resting.sum())} of {env.agents} rest"
            )
            keys = "blue: empty   purple: with a pellet   grey: resting"
            frames.append(captioned(image(env, scale=36, resting=thresholds.resting), [said, keys]))
    print(text(env))
    print("pellets of each agent:", " ".join(map(str, np.sort(env.delivered[0]))))
    if env.delivered.sum():
        print(f"Gini {float(gini(env.delivered[0])):.2f} (0: all did the same)")
    if given.gif:
        save_gif(frames, given.gif)


if __name__ == "__main__":
    main()
