"""Episodes for PPO: what whole trainings gain over the goodput rule, in the same worlds, with decisions as in use.

Every window's reward is the policy's log goodput less the rule's. The rule trains a twin of the cluster with the same
random numbers, so common effects cancel. The return sums this over many windows, so it includes what one window cannot
show: the price of changes, what a size teaches the rule, and how a step limits the next ones.
"""

import numpy as np
import torch
from torch import Tensor

from dynamix.policies.goodput import Goodput
from dynamix.policies.learned.policy import LearnedPolicy, ResidualNet
from dynamix_lab.simulator import ClusterEnv
from dynamix_lab.training.episodes import Episode
from dynamix_lab.training.hindsight import DecisionRecorder, RecordingEnv
from dynamix_lab.training.ppo import PPO
from dynamix_lab.training.rewards import SimulatedRegret

SCALE = 20.0  # of rewards: log goodputs differ by only a few per cent
LARGEST = 0.5  # log goodput: limits the effect of a slowdown that hits one of the two, as their clocks drift apart


def paired_episode(ppo: PPO, env: RecordingEnv, twin: ClusterEnv, *, windows: int) -> Episode:
    """Sampled decisions in `env`, the goodput rule's in `twin`, which is the same world.

    The effect of an action on the next window is known exactly (`Decisions`): the window's log goodput less that with
    the action's mean instead. It replaces the window's own reward in the action's advantage.
    """
    assert isinstance(ppo.net, ResidualNet)
    policy, window = LearnedPolicy(ppo.net), env.reset()
    recorder, reward, paid = DecisionRecorder(env), SimulatedRegret(env, twin, lambda _: Goodput()), []
    rows: list[tuple[Tensor, ...]] = []
    evaluated: list[tuple[Tensor, Tensor, Tensor]] = []
    for _ in range(windows):
        observed = policy.observe(window, env.bounds)
        seen, mask = torch.from_numpy(observed), torch.from_numpy(window.batch_size > 0)
        chosen, shared = ppo.act(seen, mask)
        evaluated.append(ppo.evaluate(seen, mask, chosen, shared))
        recorder.before(policy, window, observed, None)
        delta, growth = chosen.squeeze(-1).double().numpy(), shared.squeeze(-1).double().numpy()
        sizes = policy.answer(window, env.bounds, delta, growth)
        acted = torch.from_numpy((sizes != window.batch_size).any(-1))
        rows.append((seen, mask, chosen, shared, acted))
        window = env.step(sizes)
        recorder.after()
        paid.append(reward.update(window))
    rewards = torch.from_numpy(np.clip(np.array(paid), -LARGEST, LARGEST)).float() * SCALE
    observed_all, masks, chosen, shared, acted = (torch.stack(part) for part in zip(*rows, strict=True))
    log_chosen, log_shared, values = (torch.stack(part) for part in zip(*evaluated, strict=True))
    final = torch.from_numpy(policy.observe(window, env.bounds)), torch.from_numpy(window.batch_size > 0)
    credit = _credit(ppo.net, recorder, chosen, shared)
    # A decision that changes no size has no effect on its window, whatever the actions were.
    at_once = SCALE * credit[0] * acted.unsqueeze(-1), SCALE * credit[1] * acted
    known = log_chosen, log_shared, torch.cat([values, ppo.value(*final)[None]])
    duration = torch.ones_like(rewards)
    return Episode(observed_all, masks, chosen, rewards, duration, *final, shared, at_once=at_once, evaluated=known)


@torch.no_grad()
def _credit(net: ResidualNet, recorder: DecisionRecorder, chosen: Tensor, shared: Tensor) -> tuple[Tensor, Tensor]:
    """Credits (T, N, W) and (T, N) of actions (T, N, W, 1) and (T, N, 1)."""
    decisions = recorder.decisions()
    local, usual, _ = net(decisions.observed, decisions.mask)
    delta, growth = chosen.flatten(0, 1).squeeze(-1), shared.flatten(0, 1).squeeze(-1)
    own = decisions.credit(delta, growth, local.squeeze(-1))
    without = decisions.log_goodput(decisions.sizes(delta, usual.squeeze(-1)))
    common = decisions.log_goodput(decisions.sizes(delta, growth)) - without
    return own.reshape(chosen.shape[:-1]), common.reshape(shared.shape[:-1])
