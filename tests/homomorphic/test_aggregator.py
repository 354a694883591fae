"""An aggregator's sums equal the integers'; a worker or message that is wrong harms its own job only, and at once."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from dynamix.compression.wire import WireLost
from dynamix.errors import ConfigError
from dynamix_homomorphic import Aggregator
from dynamix_homomorphic.aggregator.client import AggregatorClient
from dynamix_homomorphic.aggregator.handshake import answer, greet, hear, require_plain
from dynamix_homomorphic.aggregator.job import AggregatorLimits
from dynamix_homomorphic.aggregator.protocol import ADD, DATA, HEADER, OR, Head, pack, parse_address
from dynamix_homomorphic.aggregator.server import AggregatorServer
from tests.compression.local import in_threads
from tests.homomorphic.aggregators import SMALL, TOKEN, eventually, join


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_rounds_of_any_size_equal_the_integers(workers: int, server: AggregatorServer) -> None:
    sizes = [1, 5, 1024, 1025, 70_001]
    generator = np.random.default_rng(workers)
    sums = [generator.integers(-(2**31), 2**31, (workers, n)).astype(np.int32) for n in sizes]
    bits = [generator.integers(0, 256, (workers, n)).astype(np.uint8) for n in sizes]

    def work(rank: int, client: AggregatorClient) -> None:
        for one, other in zip(sums, bits, strict=True):
            total, union = one[rank].copy(), other[rank].copy()
            client.reduce_((OR, union), (ADD, total.view(np.uint8)), (OR, union[:0]))
            assert np.array_equal(total, one.astype(np.int64).sum(0).astype(np.int32))
            assert np.array_equal(union, np.bitwise_or.reduce(other))
        client.close()

    in_threads(join(server, workers), work)
    eventually(lambda: server.statistics()["jobs"]["done"] == 1)
    assert server.statistics()["rounds"] == 2 * len(sizes)
    assert not server.statistics()["failed"]


def test_a_worker_far_ahead_is_held_back_and_loses_nothing(server: AggregatorServer) -> None:
    n = 1_000_000
    arrays = [np.full(n, rank + 1, np.int32) for rank in range(2)]

    def work(rank: int, client: AggregatorClient) -> None:
        if rank:
            time.sleep(0.2)
        client.reduce_((ADD, arrays[rank].view(np.uint8)))

    in_threads(join(server, 2), work)
    assert all((array == 3).all() for array in arrays)
    assert server.statistics()["peak_bytes"] <= SMALL.job_bytes(2) < n // 10


# who may join


def test_jobs_side_by_side_do_not_meet_and_one_that_fails_harms_no_other(server: AggregatorServer) -> None:
    clients = {name: join(server, workers, name) for name, workers in (("a", 2), ("b", 3), ("c", 2))}
    clients["c"][0]._sock.send(b"nonsense" * 5)

    def job(name: str) -> list[int]:
        def work(rank: int, client: AggregatorClient) -> int:
            for step in range(20):
                values = np.full(3000, 100 * len(clients[name]) + rank + step, np.int32)
                client.reduce_((ADD, values.view(np.uint8)))
            return int(values[-1])

        return in_threads(clients[name], work)

    found: dict[str, list[int]] = {}
    threads = [threading.Thread(target=lambda n=name: found.update({n: job(n)})) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {"a": [439, 439], "b": [960, 960, 960]}
    with pytest.raises(WireLost, match="does not begin like one"):
        clients["c"][1].reduce_((OR, np.zeros(1, np.uint8)))
    eventually(lambda: server.statistics()["failed"] == {"damaged": 1})


def test_only_who_knows_the_token_is_let_in() -> None:
    with AggregatorServer(token=TOKEN) as server:
        for token in ("", "a token of wrong content"):
            with pytest.raises(WireLost, match="wrong token"):
                AggregatorClient.connect(Aggregator(server.address, token), session="s", workers=1, rank=0)
        client = AggregatorClient.connect(Aggregator(server.address, TOKEN), session="s", workers=1, rank=0)
        client.reduce_((OR, np.ones(1, np.uint8)))
        assert server.statistics()["refused"] == {"token": 2}
        assert TOKEN not in repr(Aggregator(server.address, TOKEN))


def test_an_aggregator_that_does_not_know_the_token_is_left() -> None:
    def impostor(listener: socket.socket) -> None:
        sock, _ = listener.accept()
        with sock:
            deadline = time.monotonic() + 10
            greet(sock, bytes(32), deadline)
            require_plain(sock, deadline)
            sock.recv(4096)
            answer(sock, {"chunk_bytes": 4096, "timeout_s": 1.0}, "", bytes(32), deadline)

    with pytest.raises(WireLost, match="does not know the token"):
        _against(impostor, token=TOKEN)


def test_connections_that_say_nothing_keep_no_worker_out() -> None:
    """A worker is in within a second; the test allows more where other jobs hold the cores."""
    with AggregatorServer(limits=SMALL) as server:
        host, port = parse_address(server.address)
        silent = [socket.create_connection((host, port), timeout=30) for _ in range(300)]
        began = time.monotonic()
        workers = join(server, 2)
        assert time.monotonic() - began < 5
        for one in [*workers, *silent]:
            one.close()


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
    first = AggregatorClient.connect(where, session="s", workers=2, rank=0)
    with pytest.raises(WireLost, match=said):
        AggregatorClient.connect(where, session="s", workers=workers, rank=rank)
    second = AggregatorClient.connect(where, session="s", workers=2, rank=1)
    in_threads([first, second], lambda rank, client: client.reduce_((OR, np.ones(9, np.uint8))))
    assert server.statistics()["refused"] == {kind: 1}


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        (AggregatorLimits(jobs=1), "no more than 1 jobs"),
        (AggregatorLimits(workers=2), "3 workers are too many"),
        (AggregatorLimits(memory_bytes=2 * AggregatorLimits().job_bytes(1)), "--memory-mb"),
    ],
)
def test_a_job_beyond_the_limits_is_refused_and_the_others_go_on(limits: AggregatorLimits, said: str) -> None:
    with AggregatorServer(limits=limits) as server:
        where = Aggregator(server.address)
        client = AggregatorClient.connect(where, session="s", workers=1, rank=0)
        with pytest.raises(WireLost, match=said):
            AggregatorClient.connect(where, session="t", workers=3, rank=0)
        client.reduce_((OR, np.ones(9, np.uint8)))
        client.close()
        eventually(lambda: server.statistics()["jobs"]["running"] == 0)
        if limits.jobs == 1:
            AggregatorClient.connect(where, session="t", workers=1, rank=0).reduce_((OR, np.ones(9, np.uint8)))


def test_a_session_that_ended_is_over(server: AggregatorServer) -> None:
    join(server, 1)[0].close()
    eventually(lambda: server.statistics()["jobs"]["done"] == 1)
    with pytest.raises(WireLost, match="has ended"):
        join(server, 1)


def test_a_job_whose_worker_leaves_before_all_have_come_makes_room() -> None:
    with AggregatorServer(limits=AggregatorLimits(jobs=1)) as server:
        AggregatorClient.connect(Aggregator(server.address), session="s", workers=2, rank=0).close()
        eventually(lambda: server.statistics()["failed"] == {"left": 1})
        join(server, 1, "t")[0].reduce_((OR, np.ones(9, np.uint8)))


# what goes wrong in a round


def _message(op: int, start: int, number: int, total: int, payload: bytes) -> bytes:
    array = np.frombuffer(payload, np.uint8)
    return pack(Head(DATA, op, array.size, number, start, total), array) + payload


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
        (_message(ADD, 4096, 0, 8192, bytes(4096)), "order"),
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
    good, bad = join(server, 2)
    values = np.ones(2048, np.int32)

    def work(rank: int, client: AggregatorClient) -> None:
        if rank:
            eventually(lambda: server.statistics()["payload_bytes"] == 8192)
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
    eventually(lambda: server.statistics()["failed"] == {kind: 1})


def test_a_worker_that_stalls_ends_the_round_and_is_named(server: AggregatorServer) -> None:
    for session, half in (("early", b""), ("within", FIRST[:2000])):
        good, bad = join(server, 2, session, timeout_s=1.0)
        bad._sock.send(half)
        with pytest.raises(WireLost, match="rank 1 sent nothing"):
            good.reduce_((ADD, np.ones(8192, np.uint8)))
    eventually(lambda: server.statistics()["failed"] == {"stalled": 2})


def test_time_between_rounds_counts_for_nothing(server: AggregatorServer) -> None:
    client = join(server, 1, timeout_s=0.1)[0]
    for _ in range(3):
        client.reduce_((OR, np.ones(9, np.uint8)))
        time.sleep(0.3)
    assert not server.statistics()["failed"]


def _against(peer: Callable[[socket.socket], None], *, token: str = "") -> None:
    """One round of one worker against something that is no true aggregator."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=peer, args=(listener,))
        thread.start()
        try:
            where = Aggregator(f"127.0.0.1:{listener.getsockname()[1]}", token, timeout_s=0.2)
            client = AggregatorClient.connect(where, session="s", workers=1, rank=0)
            client.reduce_((ADD, np.arange(16, dtype=np.int32).view(np.uint8)))
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
            require_plain(sock, deadline)
            _, nonce = hear(sock, "", bytes(32), deadline)
            answer(sock, {"chunk_bytes": 4096, "timeout_s": 0.2}, "", nonce, deadline)
            message = b""
            while len(message) < HEADER.size + 64:
                message += sock.recv(104)
            if reply(message):
                sock.sendall(reply(message))
            else:
                sock.recv(1)

    with pytest.raises(WireLost, match=said):
        _against(peer)


def test_impossible_arguments_are_named() -> None:
    for address in ("nowhere", "host:", "host:0", "host:99999"):
        with pytest.raises(ConfigError, match="host:port"):
            Aggregator(address)
    with pytest.raises(ConfigError, match="timeout_s=0"):
        Aggregator("host:1", timeout_s=0)
    with pytest.raises(ConfigError, match="chunk_bytes"):
        AggregatorLimits(chunk_bytes=6)
