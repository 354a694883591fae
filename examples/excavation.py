"""S-MADRL on the excavation task: agents that see little and never talk learn to share a tunnel one cell wide.

python examples/excavation.py --gif film.gif        # some 35 s of a core; --scale 0.05 for a look
"""

from __future__ import annotations

import argparse
import dataclasses

from dynamix_lab.experiments.excavation.ground import GROUNDS
from dynamix_lab.experiments.excavation.learner import DQNTraining
from dynamix_lab.experiments.excavation.lessons import CURRICULUM
from dynamix_lab.experiments.excavation.render import image, save_gif, text
from dynamix_lab.experiments.excavation.world import Excavation, ExcavationConfig


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--agents", type=int, default=8)
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of steps to learn from")
    parser.add_argument("--steps", type=int, default=300, help="to watch them work")
    parser.add_argument("--gif")
    given = parser.parse_args()

    task = ExcavationConfig(GROUNDS["single-file"])
    stages = tuple(dataclasses.replace(s, steps=max(1, round(s.steps * given.scale))) for s in CURRICULUM)
    training = DQNTraining(task, stages=stages, seed=0)
    training.run(progress=lambda stage, part: print(f"{stage}: {part:.0%}", flush=True))

    env = Excavation(task, agents=given.agents, seed=1)
    seen, frames = env.observe(), []
    for _ in range(given.steps):
        seen, _, _ = env.step(training.learner.act(seen))
        frames.append(image(env))
    print(text(env))
    if given.gif:
        save_gif(frames, given.gif)


if __name__ == "__main__":
    main()
