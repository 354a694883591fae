"""Rollouts for PPO: regret against the lagged reference in the same world, and each worker's own credit for it."""

from __future__ import annotations

import numpy as np
import torch

from dynamix.policies.learned.policy import LearnedPolicy, ResidualNet
from dynamix.simulator import ClusterEnv, LaggedReference
from dynamix.training.hindsight import Recorder, RecordingEnv
from dynamix.training.ppo import PPO, Act, Rollout
from dynamix.window import Floats

SCALE = 5.0  # of rewards: log goodputs differ by a few per cent


def rollout(ppo: PPO, env: RecordingEnv, other: ClusterEnv, *, windows: int) -> Rollout:
    """Sampled decisions in `env`; reward: log goodput of the window less the lagged reference's in `other`, its twin.

    The advantage of worker i's own action is counterfactual: log goodput of the window that came less what it would
    have been with that worker alone at its mean action.
    """
    assert isinstance(ppo.net, ResidualNet)
    policy, teacher = LearnedPolicy(ppo.net), LaggedReference(other)
    window, reference = env.reset(), other.reset()
    recorder, rewards = Recorder(env), []
    acts: list[tuple[torch.Tensor, torch.Tensor, Act]] = []
    for _ in range(windows):
        observed = policy.observe(window, env.bounds)
        seen, mask = torch.from_numpy(observed), torch.from_numpy(window.batch_size > 0)
        act = ppo.act(seen, mask)
        acts.append((seen, mask, act))
        recorder.before(policy, window, observed, None)
        before = (env.clock_s, env.progress), (other.clock_s, other.progress)
        delta, growth = act.local.squeeze(-1).double().numpy(), act.shared.squeeze(-1).double().numpy()
        window = env.step(policy.allocate(window, env.bounds, delta, growth))
        recorder.after()
        reference = other.step(teacher.decide(reference, other.bounds))
        rewards.append(_log_goodput(env, before[0]) - _log_goodput(other, before[1]))
    seen, mask = torch.from_numpy(policy.observe(window, env.bounds)), torch.from_numpy(window.batch_size > 0)
    reward = torch.from_numpy(np.clip(np.array(rewards), -2, 2)).float() * SCALE
    played = Rollout.of(acts, ppo.value(seen, mask), reward, torch.zeros(reward.shape, dtype=torch.bool))
    played.credit = _credit(ppo.net, recorder, played)
    return played


@torch.no_grad()
def _credit(net: ResidualNet, recorder: Recorder, played: Rollout) -> torch.Tensor:
    """(T, N, W)."""
    decisions = recorder.decisions()
    usual = net(decisions.observed, decisions.mask)[0].squeeze(-1)
    credit = decisions.credit(played.local.flatten(0, 1).squeeze(-1), played.shared.flatten(0, 1).squeeze(-1), usual)
    return credit.reshape(played.log_local.shape)


def _log_goodput(env: ClusterEnv, before: tuple[Floats, Floats]) -> Floats:
    return np.asarray(np.log((env.progress - before[1]) / (env.clock_s - before[0])))
