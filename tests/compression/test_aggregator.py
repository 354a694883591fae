"""An aggregator's sums equal the integers'; whatever it, a worker or a message does, no gradient is wrong or lost."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from dynamix.compression import Aggregator, AggregatorWire, CompressionState, Layout, LocalWire, compression_hook
from dynamix.compression.aggregation import Limits
from dynamix.compression.aggregator import AggregatorServer
from dynamix.compression.link import Link
from dynamix.compression.maximum import ONE_ROUND, maximum_by_or
from dynamix.compression.protocol import ADD, DATA, OR, Head, answer, greet, hear, pack
from dynamix.compression.wire import WireLost
from dynamix.errors import ConfigError
from tests.compression.local import exchange, in_threads, reference
from tests.ranks import _CONTEXT, run_ranks

SMALL = Limits(chunk_bytes=4096, window=4)
TOKEN = "a token of enough length"
LAYOUT = Layout.of([(6000, 1), (64, 16)])


@pytest.fixture
def server() -> Iterator[AggregatorServer]:
    with AggregatorServer(limits=SMALL) as running:
        yield running


def _links(server: AggregatorServer, workers: int, session: str = "s", timeout_s: float = 20.0) -> list[Link]:
    where = Aggregator(server.address, timeout_s=timeout_s)
    return [Link.connect(where, session=session, workers=workers, rank=rank) for rank in range(workers)]


def _wires(server: AggregatorServer, workers: int, session: str = "s", timeout_s: float = 20.0) -> list[AggregatorWire]:
    links = _links(server, workers, session, timeout_s)
    return [AggregatorWire(link, spare) for link, spare in zip(links, LocalWire.make(workers), strict=True)]


def _eventually(truth: Callable[[], bool]) -> None:
    """Counting goes on after workers have been told."""
    deadline = time.monotonic() + 20
    while not truth():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _sparse(workers: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (workers, LAYOUT.elements)
    return list(torch.randn(shape, generator=generator) * (torch.rand(shape, generator=generator) < 0.08))


# what it computes


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_rounds_of_any_size_equal_the_integers(workers: int, server: AggregatorServer) -> None:
    sizes = [1, 5, 1024, 1025, 70_001]
    generator = np.random.default_rng(workers)
    sums = [generator.integers(-(2**31), 2**31, (workers, n)).astype(np.int32) for n in sizes]
    bits = [generator.integers(0, 256, (workers, n)).astype(np.uint8) for n in sizes]

    def work(rank: int, link: Link) -> None:
        for one, other in zip(sums, bits, strict=True):
            total, union = one[rank].copy(), other[rank].copy()
            link.reduce_((OR, union), (ADD, total.view(np.uint8)), (OR, union[:0]))
            assert np.array_equal(total, one.astype(np.int64).sum(0).astype(np.int32))
            assert np.array_equal(union, np.bitwise_or.reduce(other))
        link.close()

    in_threads(_links(server, workers), work)
    _eventually(lambda: server.statistics()["jobs"]["done"] == 1)
    assert server.statistics()["rounds"] == 2 * len(sizes)
    assert not server.statistics()["failed"]


@given(st.integers(0, 3 * ONE_ROUND), st.integers(1, 4), st.integers(0, 1 << 20))
@settings(max_examples=50, deadline=None)
def test_the_maximum_is_had_by_or(n: int, workers: int, seed: int) -> None:
    values = np.random.default_rng(seed).integers(0, 256, (workers, n)).astype(np.uint8)
    rounds: list[list[np.ndarray]] = [[] for _ in range(workers)]
    known: list[np.ndarray] = []

    def union(rank: int) -> Callable[[np.ndarray], None]:
        def record(bits: np.ndarray) -> None:
            place = len(rounds[rank])
            rounds[rank].append(bits.copy())
            if place < len(known):
                bits[:] = known[place]

        return record

    for _ in range(1 if n <= ONE_ROUND else 2):  # a round at a time: what all ranks bring, then what all are told
        for rank in range(workers):
            rounds[rank].clear()
            maximum_by_or(values[rank], union(rank))
        known.append(np.bitwise_or.reduce([one[len(known)] for one in rounds]))
    for rank in range(workers):
        rounds[rank].clear()
        assert np.array_equal(maximum_by_or(values[rank], union(rank)), values.max(0))
        assert sum(bits.nbytes for bits in rounds[rank]) == n * (32 if n <= ONE_ROUND else 4)


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_every_way_through_an_aggregator_equals_the_integer_reference(workers: int, server: AggregatorServer) -> None:
    inputs = _sparse(workers, seed=2)
    wires = _wires(server, workers)
    for way in ("fixed", "compaction", "lhc", "lhc-one-phase"):
        results, statistics = exchange(inputs, way, LAYOUT, steps=2, wires=wires)
        assert [s.buckets for s in statistics] == [{way: 2}] * workers
        assert all(torch.equal(result, reference(inputs, LAYOUT)) for result in results)


def test_a_gradient_that_is_not_finite_goes_dense_and_the_next_one_does_not(server: AggregatorServer) -> None:
    bad, wires = _sparse(2), _wires(server, 2)
    bad[1][100] = float("nan")
    _, statistics = exchange(bad, "compaction", LAYOUT, wires=wires)
    assert all(s.dense_after == {"nonfinite": 1} for s in statistics)
    _, statistics = exchange(_sparse(2), "compaction", LAYOUT, wires=wires)
    assert all(s.buckets == {"compaction": 1} for s in statistics)


def test_a_worker_far_ahead_is_held_back_and_loses_nothing(server: AggregatorServer) -> None:
    n = 1_000_000
    arrays = [np.full(n, rank + 1, np.int32) for rank in range(2)]

    def work(rank: int, link: Link) -> None:
        if rank:
            time.sleep(0.2)
        link.reduce_((ADD, arrays[rank].view(np.uint8)))

    in_threads(_links(server, 2), work)
    assert all((array == 3).all() for array in arrays)
    assert server.statistics()["peak_bytes"] <= SMALL.job_bytes(2) < n // 10


# who may join


def test_jobs_side_by_side_do_not_meet_and_one_that_fails_harms_no_other(server: AggregatorServer) -> None:
    links = {name: _links(server, workers, name) for name, workers in (("a", 2), ("b", 3), ("c", 2))}
    links["c"][0]._sock.send(b"nonsense" * 4)

    def job(name: str) -> list[int]:
        def work(rank: int, link: Link) -> int:
            for step in range(20):
                values = np.full(3000, 100 * len(links[name]) + rank + step, np.int32)
                link.reduce_((ADD, values.view(np.uint8)))
            return int(values[-1])

        return in_threads(links[name], work)

    found: dict[str, list[int]] = {}
    threads = [threading.Thread(target=lambda n=name: found.update({n: job(n)})) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {"a": [439, 439], "b": [960, 960, 960]}
    with pytest.raises(WireLost, match="does not begin like one"):
        links["c"][1].reduce_((OR, np.zeros(1, np.uint8)))
    _eventually(lambda: server.statistics()["failed"] == {"damaged": 1})


def test_only_who_knows_the_token_is_let_in() -> None:
    with AggregatorServer(token=TOKEN) as server:
        for token in ("", "a token of wrong content"):
            with pytest.raises(WireLost, match="wrong token"):
                Link.connect(Aggregator(server.address, token), session="s", workers=1, rank=0)
        link = Link.connect(Aggregator(server.address, TOKEN), session="s", workers=1, rank=0)
        link.reduce_((OR, np.ones(1, np.uint8)))
        assert server.statistics()["refused"] == {"token": 2}
        assert TOKEN not in repr(Aggregator(server.address, TOKEN))


def test_an_aggregator_that_does_not_know_the_token_is_left() -> None:
    def impostor(listener: socket.socket) -> None:
        sock, _ = listener.accept()
        with sock:
            deadline = time.monotonic() + 10
            greet(sock, bytes(32), deadline)
            sock.recv(4096)
            answer(sock, {"chunk_bytes": 4096, "timeout_s": 1.0}, "", bytes(32), deadline)

    with pytest.raises(WireLost, match="does not know the token"):
        _against(impostor, token=TOKEN)


def test_others_than_this_machine_need_a_token_and_a_long_one() -> None:
    with pytest.raises(ConfigError, match=r"host='0.0.0.0'"):
        AggregatorServer("0.0.0.0")
    with pytest.raises(ConfigError, match="16 or more"):
        AggregatorServer("0.0.0.0", token="short")


@pytest.mark.parametrize(
    ("workers", "rank", "kind", "said"),
    [
        (3, 1, "workers", "rank 1 says 3 workers, others of job training 2"),
        (2, 0, "rank", "rank 0 of job training is here already"),
        (2, 2, "introduction", "rank 2 of 2 workers cannot be"),
        (99, 0, "workers", "says 99 workers"),
    ],
)
def test_who_does_not_fit_is_refused_and_the_job_goes_on(
    workers: int, rank: int, kind: str, said: str, server: AggregatorServer
) -> None:
    where = Aggregator(server.address)
    first = Link.connect(where, session="s", workers=2, rank=0)
    with pytest.raises(WireLost, match=said):
        Link.connect(where, session="s", workers=workers, rank=rank)
    second = Link.connect(where, session="s", workers=2, rank=1)
    in_threads([first, second], lambda rank, link: link.reduce_((OR, np.ones(9, np.uint8))))
    assert server.statistics()["refused"] == {kind: 1}


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        (Limits(jobs=1), "no more than 1 jobs"),
        (Limits(workers=2), "3 workers are too many"),
        (Limits(memory_bytes=2 * Limits().job_bytes(1)), "--memory-mb"),
    ],
)
def test_a_job_beyond_the_limits_is_refused_and_the_others_go_on(limits: Limits, said: str) -> None:
    with AggregatorServer(limits=limits) as server:
        where = Aggregator(server.address)
        link = Link.connect(where, session="s", workers=1, rank=0)
        with pytest.raises(WireLost, match=said):
            Link.connect(where, session="t", workers=3, rank=0)
        link.reduce_((OR, np.ones(9, np.uint8)))
        link.close()
        _eventually(lambda: server.statistics()["jobs"]["running"] == 0)
        if limits.jobs == 1:
            Link.connect(where, session="t", workers=1, rank=0).reduce_((OR, np.ones(9, np.uint8)))


def test_a_session_that_ended_is_over(server: AggregatorServer) -> None:
    _links(server, 1)[0].close()
    _eventually(lambda: server.statistics()["jobs"]["done"] == 1)
    with pytest.raises(WireLost, match="has ended"):
        _links(server, 1)


def test_a_job_whose_worker_leaves_before_all_have_come_makes_room() -> None:
    with AggregatorServer(limits=Limits(jobs=1)) as server:
        Link.connect(Aggregator(server.address), session="s", workers=2, rank=0).close()
        _eventually(lambda: server.statistics()["failed"] == {"left": 1})
        _links(server, 1, "t")[0].reduce_((OR, np.ones(9, np.uint8)))


# what goes wrong in a round


def _message(op: int, chunk: int, number: int, total: int, payload: bytes) -> bytes:
    array = np.frombuffer(payload, np.uint8)
    return pack(Head(DATA, op, chunk, number, total, array.size), array) + payload


FIRST = _message(ADD, 0, 0, 8192, bytes(4096))
FLIPPED = bytearray(FIRST)
FLIPPED[1234] ^= 4


@pytest.mark.parametrize(
    ("sent", "kind"),
    [
        (FIRST[:-1], "left"),
        (FIRST[:7], "left"),
        (b"", "left"),
        (bytes(FLIPPED), "damaged"),
        (b"XX" + FIRST[2:], "damaged"),
        (FIRST[:2] + bytes([9]) + FIRST[3:], "damaged"),
        (FIRST + FIRST, "order"),
        (_message(ADD, 1, 0, 8192, bytes(4096)), "order"),
        (_message(ADD, 0, 1, 8192, bytes(4096)), "order"),
        (_message(ADD, 0, 0, 8192, bytes(4000)), "order"),
        (_message(ADD, 0, 0, 6, bytes(6)), "order"),
        (_message(OR, 0, 0, 8192, bytes(4096)), "mixed"),
        (_message(ADD, 0, 0, 4096, bytes(4096)), "mixed"),
        (_message(ADD, 0, 0, 1 << 40, bytes(4096)), "limit"),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{len(value)} bytes",
)
def test_a_bad_message_ends_the_round_for_all_of_the_job(sent: bytes, kind: str, server: AggregatorServer) -> None:
    good, bad = _links(server, 2)
    values = np.ones(2048, np.int32)

    def work(rank: int, link: Link) -> None:
        if rank:
            _eventually(lambda: server.statistics()["payload_bytes"] == 8192)
            bad._sock.setblocking(True)
            bad._sock.sendall(sent)
            if kind == "left":
                bad.close()
        else:
            good.reduce_((ADD, values.view(np.uint8)))

    with pytest.raises(WireLost) as lost:
        in_threads([good, bad], work)
    with pytest.raises(WireLost, match=str(lost.value)[:20]):
        good.reduce_((ADD, values.view(np.uint8)))
    _eventually(lambda: server.statistics()["failed"] == {kind: 1})


def test_a_worker_that_stalls_ends_the_round_and_is_named(server: AggregatorServer) -> None:
    for session, half in (("early", b""), ("within", FIRST[:2000])):
        good, bad = _links(server, 2, session, timeout_s=0.2)
        bad._sock.send(half)
        with pytest.raises(WireLost, match="rank 1 sent nothing"):
            good.reduce_((ADD, np.ones(4, np.uint8)))
    _eventually(lambda: server.statistics()["failed"] == {"stalled": 2})


def test_time_between_rounds_counts_for_nothing(server: AggregatorServer) -> None:
    link = _links(server, 1, timeout_s=0.1)[0]
    for _ in range(3):
        link.reduce_((OR, np.ones(9, np.uint8)))
        time.sleep(0.3)
    assert not server.statistics()["failed"]


def _against(peer: Callable[[socket.socket], None], *, token: str = "") -> None:
    """One round of one worker against something that is no true aggregator."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=peer, args=(listener,))
        thread.start()
        try:
            where = Aggregator(f"127.0.0.1:{listener.getsockname()[1]}", token, timeout_s=0.2)
            link = Link.connect(where, session="s", workers=1, rank=0)
            link.reduce_((ADD, np.arange(16, dtype=np.int32).view(np.uint8)))
        finally:
            thread.join()


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (lambda message: b"", "silent"),
        (lambda message: message[:20], "closed the connection"),
        (lambda message: message[:2] + b"\x02" + message[3:50] + b"!" + message[51:], "checksum"),
        (lambda message: message, "another result was due"),
    ],
    ids=["silent", "truncated", "flipped", "echo"],
)
def test_a_worker_trusts_no_result_that_is_late_short_or_damaged(reply: Callable[[bytes], bytes], said: str) -> None:
    def peer(listener: socket.socket) -> None:
        sock, _ = listener.accept()
        with sock:
            deadline = time.monotonic() + 10
            greet(sock, bytes(32), deadline)
            _, nonce = hear(sock, "", bytes(32), deadline)
            answer(sock, {"chunk_bytes": 4096, "timeout_s": 0.2}, "", nonce, deadline)
            message = b""
            while len(message) < 32 + 64:
                message += sock.recv(96)
            if reply(message):
                sock.sendall(reply(message))
            else:
                sock.recv(1)

    with pytest.raises(WireLost, match=said):
        _against(peer)


class Breaking(AggregatorWire):
    """Loses its link before or after one of its rounds."""

    def __init__(self, wire: AggregatorWire, at: int, *, after: bool) -> None:
        super().__init__(wire.link, wire.reserve)
        self.rounds, reduce_ = 0, wire.link.reduce_

        def breaking(*parts: Any) -> None:
            self.rounds += 1
            if after:
                reduce_(*parts)
            if self.rounds == at:
                wire.link.close("cut by the test")
                raise WireLost("cut by the test")
            if not after:
                reduce_(*parts)

        wire.link.reduce_ = breaking  # type: ignore[method-assign]


@pytest.mark.parametrize("way", ["compaction", "lhc", "lhc-one-phase"])
@pytest.mark.parametrize("after", [False, True])
def test_wherever_one_rank_loses_it_all_ranks_end_with_the_same_dense_mean(
    way: str, after: bool, server: AggregatorServer
) -> None:
    """After its last round only the vote can tell the others, who have everything they need."""
    inputs = _sparse(3)
    want = torch.stack([x / 3 for x in inputs]).sum(0)
    for at in range(1, 9):
        wires = _wires(server, 3, f"{way} {after} {at}")
        wires[1] = breaking = Breaking(wires[1], at, after=after)
        results, statistics = exchange(inputs, way, LAYOUT, wires=wires)
        if breaking.rounds < at:  # there were no more: nothing was lost
            assert at > 4
            assert all(s.buckets == {way: 1} for s in statistics)
            break
        assert all(s.dense_after == {"lost": 1} for s in statistics)
        torch.testing.assert_close(results[0], want, rtol=1e-6, atol=1e-7)
        assert all(torch.equal(result, results[0]) for result in results)
    else:
        raise AssertionError("more rounds than expected")


# training on real ranks


class Net(nn.Module):
    """An embedding under three layers, every one a bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(300, 16)
        self.layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))

    def forward(self, words: Tensor) -> Tensor:
        out: Tensor = self.layers(self.table(words).mean(1))
        return out


class Copied:
    """A bucket again, so that other states can reduce it."""

    def __init__(self, bucket: Any) -> None:
        self._flat, self.index, self.parameters = bucket.buffer().clone(), bucket.index, bucket.parameters

    def buffer(self) -> Tensor:
        return self._flat


STEPS = 8


def _train_while_it_dies(rank: int, address: str, pid: int, mode: str, at: int) -> dict[str, Any]:
    """Every bucket beside dense fixed point and plain all-reduce; the aggregator is killed before round `at`."""
    torch.manual_seed(0)
    net = Net()
    model = DDP(net, bucket_cap_mb=0.001)
    states = [
        CompressionState("fixed", model=net),
        CompressionState("dense"),
        CompressionState(mode, model=net, aggregator=Aggregator(address, TOKEN, timeout_s=20)),  # type: ignore[arg-type]
    ]
    link, rounds, equal = states[2]._link, 0, []
    assert link is not None
    reduce_ = link.reduce_

    def killing(*parts: Any) -> None:
        nonlocal rounds
        rounds += 1
        if rank == 1 and rounds == at:
            os.kill(pid, signal.SIGKILL)
        reduce_(*parts)

    link.reduce_ = killing  # type: ignore[method-assign]

    def hook(state: Any, bucket: Any) -> Any:
        fixed, dense = (s.reduce(Copied(bucket)) for s in states[:2])  # type: ignore[arg-type]

        def compare(found: Any) -> Tensor:
            value: Tensor = found.value()
            equal.append((torch.equal(value, fixed.wait()), torch.equal(value, dense.wait())))
            return value

        return compression_hook(states[2], bucket).then(compare)

    hook.__annotations__.clear()
    model.register_comm_hook(None, hook)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for step in range(STEPS):
        words = torch.randint(0, 300, (4, 3), generator=torch.Generator().manual_seed(1000 * step + rank))
        F.mse_loss(model(words), (words.float().mean(1, keepdim=True) / 300).expand(-1, 16)).backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = torch.cat([p.detach().flatten() for p in net.parameters()])
    return {"equal": equal, "weights": weights, "statistics": states[2].statistics.as_dict(), "ways": states[2].ways}


def _nobody_there(rank: int, address: str) -> list[str]:
    said = []
    for where in (Aggregator(address), Aggregator("127.0.0.1:9") if rank else Aggregator(address, TOKEN)):
        try:
            CompressionState("compaction", aggregator=where)
        except ConfigError as error:
            said.append(str(error))
    return said


def _on_ranks(rank: int, lives: list[tuple[str, int, str, int]]) -> tuple[list[str], list[dict[str, Any]]]:
    return _nobody_there(rank, lives[0][0]), [_train_while_it_dies(rank, *life) for life in lives]


def _serve(pipe: Any) -> None:
    server = AggregatorServer(token=TOKEN)
    pipe.send(server.address)
    server.serve()


@pytest.mark.multiproc
def test_training_goes_on_densely_when_the_aggregator_is_killed(tmp_path: Any) -> None:
    """Once as the command that users start, once as a process of our own. Before that, all ranks are let in or none."""
    file = tmp_path / "token"
    file.write_text(TOKEN + "\n")
    command = [sys.executable, "-m", "dynamix.compression.aggregator", "--token-file", str(file)]
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
        assert one["statistics"]["dense_after"] == {"lost": 1}
        assert set(one["ways"].values()) == {"dense"}
        for equal in (one["equal"], other["equal"]):
            lost = [fixed for fixed, _ in equal].index(False)
            assert lost > 2, "it lived for some buckets"
            assert len(equal) > 3 * STEPS
            assert all(fixed for fixed, _ in equal[:lost])
            assert all(dense for _, dense in equal[lost:]), "plain all-reduce, bit for bit"


def test_impossible_arguments_are_named() -> None:
    for address in ("nowhere", "host:", "host:0", "host:99999"):
        with pytest.raises(ConfigError, match="host:port"):
            Aggregator(address)
    with pytest.raises(ConfigError, match="timeout_s=0"):
        Aggregator("host:1", timeout_s=0)
    with pytest.raises(ConfigError, match="chunk_bytes"):
        Limits(chunk_bytes=6)
