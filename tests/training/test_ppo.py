"""Our PPO: learns as well as stable-baselines3's on the same environment, masks, and resumes exactly."""

from __future__ import annotations

import copy
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dynamix.training.ppo import PPO, PPOConfig, Rollout

STEPS, ENVS, HORIZON = 12_288, 8, 128


class Docking(gymnasium.Env[np.ndarray, np.ndarray]):
    """Bring a drifting point to the origin: position and velocity seen, force acted, 40 steps."""

    observation_space = gymnasium.spaces.Box(-10, 10, (2,), np.float32)
    action_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.t, self.state = 0, self.np_random.uniform(-1, 1, 2)
        return self.state.astype(np.float32), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        force = float(np.clip(action, -1, 1)[0])
        x, v = self.state
        self.state = np.clip(np.array([x + 0.2 * v, 0.95 * v + 0.3 * force]), -10, 10)
        self.t += 1
        reward = -float(self.state[0] ** 2 + 0.1 * self.state[1] ** 2 + 0.02 * force**2)
        return self.state.astype(np.float32), reward, self.t >= 40, False, {}


class Single(nn.Module):
    """SB3's default shape: separate 64x64 tanh networks; one worker, no shared action."""

    def __init__(self, inputs: int = 2, actions: int = 1) -> None:
        super().__init__()
        self.actor = nn.Sequential(
            nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, actions)
        )
        self.critic = nn.Sequential(nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
        nn.init.zeros_(self.actor[-1].bias)
        with torch.no_grad():
            self.actor[-1].weight.mul_(0.01)
        self.log_std_local = nn.Parameter(torch.zeros(actions))
        self.log_std_shared = nn.Parameter(torch.zeros(0))

    def forward(self, observed: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        weight = mask.unsqueeze(-1).to(observed.dtype)
        pooled = (observed * weight).sum(1) / weight.sum(1)
        return self.actor(observed), observed.new_zeros(len(observed), 0), self.critic(pooled).squeeze(-1)


def _train(steps: int, seed: int) -> Single:
    torch.manual_seed(seed)
    net = Single()
    ppo = PPO(net, PPOConfig(learning_rate=1e-3, minibatch=256), seed=seed)
    envs = [Docking() for _ in range(ENVS)]
    seen = np.stack([env.reset(seed=seed * 100 + i)[0] for i, env in enumerate(envs)])
    mask = torch.ones(ENVS, 1, dtype=torch.bool)
    for _ in range(steps // (ENVS * HORIZON)):
        acts, rewards, done = [], torch.zeros(HORIZON, ENVS), torch.zeros(HORIZON, ENVS, dtype=torch.bool)
        for t in range(HORIZON):
            observed = torch.from_numpy(seen)[:, None]
            act = ppo.act(observed, mask)
            acts.append((observed, mask, act))
            rows = []
            for i, env in enumerate(envs):
                row, rewards[t, i], over, _, _ = env.step(act.local[i, 0].numpy())
                done[t, i] = over
                rows.append(env.reset()[0] if over else row)
            seen = np.stack(rows)
        ppo.update([Rollout.of(acts, ppo.value(torch.from_numpy(seen)[:, None], mask), rewards, done)])
    return net


def _score(act: Any) -> float:
    total, env = 0.0, Docking()
    for i in range(20):
        seen, over = env.reset(seed=10_000 + i)[0], False
        while not over:
            seen, reward, over, _, _ = env.step(act(seen))
            total += reward / 20
    return total


@pytest.mark.slow
def test_it_learns_as_well_as_stable_baselines3_on_the_same_environment() -> None:
    from stable_baselines3 import PPO as SB3
    from stable_baselines3.common.env_util import make_vec_env

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        net = _train(STEPS, 0)
        theirs = SB3(
            "MlpPolicy",
            make_vec_env(Docking, ENVS, seed=0),
            n_steps=HORIZON,
            batch_size=256,
            learning_rate=1e-3,
            seed=0,
            device="cpu",
        )
        theirs.learn(STEPS)
    finally:
        torch.set_num_threads(threads)
    mask = torch.ones(1, 1, dtype=torch.bool)
    with torch.no_grad():
        ours = _score(lambda seen: net(torch.from_numpy(seen)[None, None], mask)[0][0, 0].numpy())
    reference = _score(lambda seen: theirs.predict(seen, deterministic=True)[0])
    nothing = _score(lambda seen: np.zeros(1))
    # Both must get most of what can be had (returns are negative costs), ours at most 10 % behind.
    assert reference > 0.5 * nothing
    assert ours > reference - 0.1 * (reference - nothing)


def _batch(seed: int, workers: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.ones(16, workers, dtype=torch.bool)
    mask[:, -1] = False
    return torch.randn(16, workers, 2, generator=generator), mask


def _rollout(ppo: PPO, seed: int) -> Rollout:
    acts = []
    for t in range(4):
        observed, mask = _batch(seed + t)
        acts.append((observed, mask, ppo.act(observed, mask)))
    observed, mask = _batch(seed + 9)
    rewards = torch.stack([-(a.local.squeeze(-1) * m).square().sum(-1) for _, m, a in acts])
    return Rollout.of(acts, ppo.value(observed, mask), rewards, torch.zeros(4, 16, dtype=torch.bool))


def test_stop_and_resume_gives_identical_weights() -> None:
    torch.manual_seed(0)
    whole = PPO(Single(), seed=1)
    whole.update([_rollout(whole, 0)])
    saved = copy.deepcopy(whole.state_dict())
    whole.update([_rollout(whole, 100)])
    resumed = PPO(Single(), seed=99)
    resumed.load_state_dict(saved)
    resumed.update([_rollout(resumed, 100)])
    for a, b in zip(whole.net.parameters(), resumed.net.parameters(), strict=True):
        assert torch.equal(a, b)


def test_what_an_inactive_worker_sees_and_does_changes_nothing() -> None:
    torch.manual_seed(0)
    start = Single()
    results = []
    for junk in (0.0, 50.0):
        ppo = PPO(copy.deepcopy(start), seed=1)
        rollout = _rollout(ppo, 0)
        rollout.observed[:, :, -1] = junk
        rollout.local[:, :, -1] = junk
        ppo.update([rollout])
        results.append(torch.cat([p.detach().flatten() for p in ppo.net.parameters()]))
    assert torch.equal(results[0], results[1])
