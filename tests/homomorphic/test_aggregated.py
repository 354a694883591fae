"""Gradients through an aggregator equal the integer reference; when it is lost, no gradient is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

from dynamix.compression import CompressionState, Layout
from dynamix.compression.wire import WireLost
from dynamix.errors import ConfigError
from dynamix_homomorphic import Aggregator, AggregatorWire
from dynamix_homomorphic.aggregator.server import AggregatorServer
from tests.compression.local import exchange, reference
from tests.homomorphic.aggregators import TOKEN, join_wires
from tests.homomorphic.beside import Net, beside_fixed, trained, words_of
from tests.ranks import _CONTEXT, refusal, run_ranks

LAYOUT = Layout.of([(6000, 1), (64, 16)])


def _sparse(workers: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (workers, LAYOUT.elements)
    return list(torch.randn(shape, generator=generator) * (torch.rand(shape, generator=generator) < 0.08))


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_every_way_through_an_aggregator_equals_the_integer_reference(workers: int, server: AggregatorServer) -> None:
    inputs = _sparse(workers, seed=2)
    wires = join_wires(server, workers)
    for way in ("fixed", "compaction", "lhc", "lhc-one-phase"):
        results, statistics = exchange(inputs, way, LAYOUT, steps=2, wires=wires)
        assert [s.buckets for s in statistics] == [{way: 2}] * workers
        assert all(torch.equal(result, reference(inputs, LAYOUT)) for result in results)


class Breaking(AggregatorWire):
    """Loses its client before or after one of its rounds."""

    def __init__(self, wire: AggregatorWire, at: int, *, after: bool) -> None:
        super().__init__(wire.client, wire.reserve)
        self.rounds, reduce_ = 0, wire.client.reduce_

        def breaking(*parts: Any) -> None:
            self.rounds += 1
            if after:
                reduce_(*parts)
            if self.rounds == at:
                wire.client.close("cut by the test")
                raise WireLost("cut by the test")
            if not after:
                reduce_(*parts)

        wire.client.reduce_ = breaking  # type: ignore[method-assign]


@pytest.mark.parametrize("way", ["compaction", "lhc", "lhc-one-phase"])
@pytest.mark.parametrize("after", [False, True])
def test_wherever_one_rank_loses_it_all_ranks_end_with_the_same_integers(
    way: str, after: bool, server: AggregatorServer
) -> None:
    """After its last round only the vote can tell the others, who have everything they need."""
    inputs = _sparse(3)
    for at in range(1, 9):
        wires = join_wires(server, 3, f"{way} {after} {at}")
        wires[1] = breaking = Breaking(wires[1], at, after=after)
        results, statistics = exchange(inputs, way, LAYOUT, wires=wires)
        if breaking.rounds < at:  # there were no more: nothing was lost
            assert at > 4
            assert all(s.buckets == {way: 1} for s in statistics)
            break
        assert all((s.lost, dict(s.dense_after)) == (1, {}) for s in statistics)
        assert all(torch.equal(result, reference(inputs, LAYOUT)) for result in results)
    else:
        raise AssertionError("more rounds than expected")


# training on real ranks


STEPS = 8


def _train_while_it_dies(rank: int, address: str, pid: int, mode: str, at: int) -> dict[str, Any]:
    """Every bucket beside dense fixed point; the aggregator is killed before round `at`."""
    torch.manual_seed(0)
    net = Net()
    model = DDP(net, bucket_cap_mb=0.001)
    equal: list[bool] = []
    state = CompressionState(mode, model=net, aggregator=Aggregator(address, TOKEN, timeout_s=20))
    hook, link = beside_fixed(net, state, equal), state._link
    assert link is not None
    client, rounds = link.client, 0
    assert client is not None
    reduce_ = client.reduce_

    def killing(*parts: Any) -> None:
        nonlocal rounds
        rounds += 1
        if rank == 1 and rounds == at:
            os.kill(pid, signal.SIGKILL)
        reduce_(*parts)

    client.reduce_ = killing  # type: ignore[method-assign]

    model.register_comm_hook(None, hook)
    assert len(list(trained(net, model, rank, STEPS))) == STEPS
    weights = torch.cat([p.detach().flatten() for p in net.parameters()])
    return {"equal": equal, "weights": weights, "statistics": state.statistics.as_dict(), "ways": state.ways}


def _nobody_there(rank: int, address: str) -> list[str]:
    tried = (Aggregator(address), Aggregator("127.0.0.1:9") if rank else Aggregator(address, TOKEN))
    return [refusal(ConfigError, CompressionState, "compaction", aggregator=where) for where in tried]


def _on_ranks(rank: int, lives: list[tuple[str, int, str, int]]) -> tuple[list[str], list[dict[str, Any]]]:
    return _nobody_there(rank, lives[0][0]), [_train_while_it_dies(rank, *life) for life in lives]


def _serve(pipe: Any) -> None:
    server = AggregatorServer(token=TOKEN)
    pipe.send(server.address)
    server.serve()


@pytest.mark.multiproc
def test_training_goes_on_bit_for_bit_when_the_aggregator_is_killed(tmp_path: Any) -> None:
    """Once as the command that users start, once as a process of our own. Before that, all ranks are let in or none."""
    file = tmp_path / "token"
    file.write_text(TOKEN + "\n")
    command = [sys.executable, "-m", "dynamix.cli.app", "aggregator", "--token-file", str(file)]
    there, here = _CONTEXT.Pipe()
    own = _CONTEXT.Process(target=_serve, args=(here,))
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        own.start()
        assert server.stdout is not None
        address = server.stdout.readline().split()[-1]
        lives = [(address, server.pid, "compaction", 60), (there.recv(), own.pid, "lhc-one-phase", 61)]
        results = run_ranks(_on_ranks, 2, lives, timeout_s=100)
    finally:
        own.kill()
        server.kill()
        server.communicate()
    for said, _ in results:
        assert "wrong token" in said[0]
        assert "another rank" in said[1] or "refused" in said[1].lower()
    for one, other in zip(results[0][1], results[1][1], strict=True):
        assert torch.equal(one["weights"], other["weights"])
        assert one["statistics"] == other["statistics"]
        assert one["statistics"]["lost"] == 1
        assert not one["statistics"]["dense_after"]
        assert "dense" not in one["ways"].values(), "the same way goes on over the process group"
        for equal in (one["equal"], other["equal"]):
            assert len(equal) > 3 * STEPS
            assert all(equal)


# and when it is back


def _train_while_it_is_away(rank: int, address: str, folder: str) -> dict[str, Any]:
    """The aggregator is killed at step 10 and started again, elsewhere, at step 20."""
    torch.manual_seed(0)
    model = DDP(Net(), bucket_cap_mb=0.001)
    state = CompressionState("compaction", model=model.module, aggregator=Aggregator(address, timeout_s=20))
    equal: list[bool] = []
    model.register_comm_hook(None, beside_fixed(model.module, state, equal))
    back, deadline = -1, time.monotonic() + 60
    for step in range(100_000):
        if step in (10, 20) and rank == 0:
            (Path(folder) / f"step{step}").touch()
        words = words_of(rank, step)
        model(words).square().sum().backward()
        model.zero_grad()
        if state.statistics.rejoined and back < 0:
            back = step
        ended = torch.tensor([int((back >= 0 and step > back + 5) or time.monotonic() > deadline)])
        dist.all_reduce(ended, op=dist.ReduceOp.MAX)
        if ended.item():
            break
        time.sleep(0.005)
    return {"back": back, "equal": all(equal), "statistics": state.statistics.as_dict()}


@pytest.mark.multiproc
@pytest.mark.timeout(150)
def test_the_aggregator_is_joined_again_when_it_is_back(tmp_path: Any) -> None:
    first = AggregatorServer()
    port = int(first.address.rpartition(":")[2])
    ended = threading.Event()

    def come_and_go() -> None:
        with first:
            while not (tmp_path / "step10").exists() and not ended.is_set():
                time.sleep(0.005)
        while not (tmp_path / "step20").exists() and not ended.is_set():
            time.sleep(0.005)
        with AggregatorServer(port=port):
            ended.wait(120)

    thread = threading.Thread(target=come_and_go)
    thread.start()
    try:
        results = run_ranks(_train_while_it_is_away, 2, first.address, str(tmp_path), timeout_s=100)
    finally:
        ended.set()
        thread.join()
    assert results[0]["back"] > 20
    for result in results:
        del result["statistics"]["payload_bytes"]  # one rank may have sent more of the exchange that was lost
    assert results[0] == results[1]
    assert results[0]["equal"]
    counted = results[0]["statistics"]
    assert (counted["lost"], counted["rejoined"], counted["dense_after"]) == (1, 1, {})
