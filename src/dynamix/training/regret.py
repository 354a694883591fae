"""Episodes for PPO: regret against the lagged reference in the same world, and each worker's own credit for it."""

import numpy as np
import torch
from torch import Tensor

from dynamix.policies.learned.policy import LearnedPolicy, ResidualNet
from dynamix.simulator import ClusterEnv
from dynamix.training.episodes import Episode
from dynamix.training.hindsight import DecisionRecorder, RecordingEnv
from dynamix.training.ppo import PPO
from dynamix.training.rewards import SimulatedRegret

SCALE = 5.0  # of rewards: log goodputs differ by a few per cent


def regret_episode(ppo: PPO, env: RecordingEnv, other: ClusterEnv, *, windows: int) -> Episode:
    """Sampled decisions in `env`; reward: log goodput of the window less the lagged reference's in `other`, its twin.

    The advantage of worker i's own action is counterfactual: log goodput of the window that came less what it would
    have been with that worker alone at its mean action.
    """
    assert isinstance(ppo.net, ResidualNet)
    policy, window = LearnedPolicy(ppo.net), env.reset()
    recorder, regret, rewards = DecisionRecorder(env), SimulatedRegret(env, other), []
    rows: list[tuple[Tensor, ...]] = []
    evaluated: list[tuple[Tensor, Tensor, Tensor]] = []
    for _ in range(windows):
        observed = policy.observe(window, env.bounds)
        seen, mask = torch.from_numpy(observed), torch.from_numpy(window.batch_size > 0)
        chosen, shared = ppo.act(seen, mask)
        rows.append((seen, mask, chosen, shared))
        evaluated.append(ppo.evaluate(seen, mask, chosen, shared))
        recorder.before(policy, window, observed, None)
        delta, growth = chosen.squeeze(-1).double().numpy(), shared.squeeze(-1).double().numpy()
        window = env.step(policy.allocate(window, env.bounds, delta, growth))
        recorder.after()
        rewards.append(regret.update(window))
    reward = torch.from_numpy(np.clip(np.array(rewards), -2, 2)).float() * SCALE
    observed_all, masks, chosen, shared = (torch.stack(part) for part in zip(*rows, strict=True))
    log_chosen, log_shared, values = (torch.stack(part) for part in zip(*evaluated, strict=True))
    final = torch.from_numpy(policy.observe(window, env.bounds)), torch.from_numpy(window.batch_size > 0)
    credit = _credit(ppo.net, recorder, chosen, shared)
    known = log_chosen, log_shared, torch.cat([values, ppo.value(*final)[None]])
    duration = torch.ones_like(reward)
    return Episode(observed_all, masks, chosen, reward, duration, *final, shared, credit=credit, evaluated=known)


@torch.no_grad()
def _credit(net: ResidualNet, recorder: DecisionRecorder, chosen: Tensor, shared: Tensor) -> Tensor:
    """(T, N, W) from actions (T, N, W, 1) and (T, N, 1)."""
    decisions = recorder.decisions()
    usual = net(decisions.observed, decisions.mask)[0].squeeze(-1)
    credit = decisions.credit(chosen.flatten(0, 1).squeeze(-1), shared.flatten(0, 1).squeeze(-1), usual)
    return credit.reshape(chosen.shape[:-1])
