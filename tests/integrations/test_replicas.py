"""Shares of replicas that come and go: every sample once, and the same state on all."""

from __future__ import annotations

import threading
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from dynamix.errors import ConfigError, UsageError
from dynamix.integrations.replicas import ReplicaShares


def meet(replicas: list[ReplicaShares]) -> None:
    """All of them at once, in threads; each is told the mean."""
    workers, barrier = len(replicas), threading.Barrier(len(replicas))
    told: list[Tensor] = [torch.zeros(0)] * workers

    def one(rank: int) -> None:
        def average(mine: Tensor) -> None:
            told[rank] = mine.clone()
            barrier.wait(timeout=30)
            mine.copy_(torch.stack(told).mean(0))

        replicas[rank].meet(rank, workers, average)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)


NOW_S = [0.0]


@pytest.fixture(autouse=True)
def told_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas look at a clock that stands still while they are dealt samples."""
    monkeypatch.setattr("dynamix.integrations.replicas.time", SimpleNamespace(perf_counter=lambda: NOW_S[0]))


def trained(replicas: list[ReplicaShares], seconds: list[float]) -> None:
    """As if each had computed for so long a sample."""
    for replica, each in zip(replicas, seconds, strict=True):
        NOW_S[0] = float(replica.counts[replica.rank]) * each
        replica.computed()
    NOW_S[0] = 0.0


def one_round(replicas: list[ReplicaShares], seconds: list[float]) -> None:
    meet(replicas)
    for replica in replicas:
        replica.deal()
    trained(replicas, seconds)
    for replica in replicas:
        replica.done(committed=True)


def test_replicas_come_and_go_and_every_sample_comes_once() -> None:
    random, speeds = np.random.default_rng(0), [0.001, 0.002, 0.004, 0.001]
    here = [ReplicaShares(103, 16, interval=2, seed=3) for _ in range(3)]
    seconds, seen = speeds[:3], Counter[tuple[int, int]]()
    for step in range(120):
        if step == 20:
            here, seconds = here[:2], seconds[:2]  # one is lost
        if step in (40, 60):
            joins = ReplicaShares(103, 16, interval=2, seed=3)
            joins.load_state_dict(here[0].state_dict())
            here, seconds = [joins, *here], [speeds[step // 20], *seconds]
        meet(here)
        epoch = here[0].epoch
        dealt = [replica.deal(least=1) for replica in here]
        assert sum(replica.weight for replica in here) == pytest.approx(len(here))
        trained(here, seconds)
        committed = bool(random.random() > 0.2)
        for replica, picked in zip(here, dealt, strict=True):
            if committed and replica.weight:
                seen.update((epoch, sample) for sample in picked)
            assert replica.done(committed=committed) is committed
        assert len({str(replica.state_dict()) for replica in here}) == 1
    epochs = here[0].epoch
    assert epochs > 5
    whole = {key: times for key, times in seen.items() if key[0] < epochs}
    assert whole == {(epoch, sample): 1 for epoch in range(epochs) for sample in range(103)}
    assert here[0].sizes.sum() == 16


def test_shares_follow_speed_at_once_when_one_joins() -> None:
    first, second = ReplicaShares(1000, 90), ReplicaShares(1000, 90)
    one_round([first], [0.001])
    second.load_state_dict(first.state_dict())
    for _ in range(2):
        one_round([first, second], [0.001, 0.002])
        assert first.sizes.tolist() == [45, 45]  # nothing is known of the second
    while first.rounds % first.interval:
        one_round([first, second], [0.001, 0.002])
    meet([first, second])
    assert first.sizes.tolist() == second.sizes.tolist() == [60, 30]


def test_pieces_are_a_share_in_order() -> None:
    shares = ReplicaShares(40, 20, shuffle=False)
    assert shares.pieces(8) == []  # it has met nobody
    meet([shares])
    assert [len(piece) for piece in shares.pieces(8)] == [4, 8, 8]
    assert [sample for piece in shares.pieces(8) for sample in piece] == list(range(20))


def test_a_part_of_weight_zero_is_zero_whatever_it_holds() -> None:
    shares = ReplicaShares(40, 20)
    shares.weight = 0.0
    assert shares.weigh_(torch.tensor([float("nan")])).item() == 0.0


def test_what_is_told_from_outside_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYNAMIX_POLICY", "static")
    ReplicaShares(40, 20, policy="dbs")  # which is not asked
    monkeypatch.setenv("DYNAMIX_POLICY", "dbs")
    with pytest.raises(ConfigError, match="policy='dbs'"):
        ReplicaShares(40, 20)


def test_what_cannot_be_is_refused() -> None:
    for policy in ("dbs", "pollux", "compare:static,lb_bsp"):
        with pytest.raises(ConfigError, match="policy"):
            ReplicaShares(40, 20, policy=policy)
    with pytest.raises(ConfigError, match="batch_size"):
        ReplicaShares(40, 41)
    shares = ReplicaShares(40, 20)
    with pytest.raises(UsageError, match="met"):
        shares.deal()
    with pytest.raises(UsageError, match="spare"):
        shares.meet(None, 2, lambda told: None)
