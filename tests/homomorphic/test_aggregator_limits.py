"""What an aggregator bears: odd handshakes, crowds of one address, and workers that lose it again and again."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
import time

import numpy as np
import pytest

from dynamix.compression.wire import WireLost
from dynamix_homomorphic.aggregator.admission import Greetings
from dynamix_homomorphic.aggregator.client import AggregatorClient
from dynamix_homomorphic.aggregator.handshake import (
    PLAIN,
    Introduction,
    flat_object,
    greet,
    introduce,
    proof,
    receive_part,
    send_part,
)
from dynamix_homomorphic.aggregator.job import AggregatorLimits
from dynamix_homomorphic.aggregator.link import Backoff
from dynamix_homomorphic.aggregator.protocol import ADD, OR, ProtocolError, parse_address
from dynamix_homomorphic.aggregator.server import AggregatorServer
from tests.compression.local import in_threads
from tests.homomorphic.aggregators import eventually, join

WHO = {"job": "x", "session": "s", "workers": 1, "rank": 0, "timeout_s": 5.0, "nonce": "00" * 32}
ODD = [
    b"[" * 4000,
    b'{"a":' * 800 + b"1" + b"}" * 800,
    b"",
    b"3",
    b"{}",
    b"\xff\xfe{\x00}\x00",
    *(
        json.dumps(WHO).replace("5.0", number).encode()
        for number in ("1e999", "-1e999", "NaN", "Infinity", "9" * 3000, "9" * 3000 + ".0")
    ),
    *(
        json.dumps({**WHO, name: value}).encode()
        for name, value in [("workers", True), ("rank", "0"), ("session", {"deep": [[[]]]}), ("job", None)]
    ),
    *(json.dumps({**WHO, "workers": workers}).encode() for workers in (10**300, 1 << 21)),
    json.dumps({**WHO, "rank": -1}).encode(),
]
NONCES = [json.dumps({**WHO, "nonce": nonce}).encode() for nonce in ("zz", "00", "", None, 7)]


def test_names_may_hold_brackets_and_any_letters() -> None:
    odd = {**WHO, "job": '[{"\\é\ud800}]'}
    assert Introduction.of(flat_object(json.dumps(odd).encode())).job.isascii()


def test_an_aggregator_goes_on_after_all_of_them(server: AggregatorServer) -> None:
    where = parse_address(server.address)
    for said in ODD + NONCES:
        with socket.create_connection(where, timeout=10) as sock:
            deadline = time.monotonic() + 10
            sock.sendall(PLAIN)
            nonce = receive_part(sock, deadline)[-32:]
            send_part(sock, proof("", b"worker", nonce, said) + said, deadline)
            assert b"refused" in receive_part(sock, deadline)
    for raw in (
        b"GET / HTTP/1.1\r\n\r\n",
        PLAIN + struct.pack("<I", 1 << 31),
        PLAIN + struct.pack("<I", 4097),
        PLAIN[:3],
    ):
        with socket.create_connection(where, timeout=10) as sock:
            sock.sendall(raw)
            with contextlib.suppress(OSError):  # more was said than is read: the server may have closed by now
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(4096):
                    pass
    eventually(lambda: server.statistics()["refused"] == {"introduction": len(ODD + NONCES) + 4})
    join(server, 1)[0].reduce_((OR, np.ones(9, np.uint8)))


@pytest.mark.parametrize(
    "terms",
    [b"[" * 4000, b'{"chunk_bytes": 1e999, "timeout_s": 5}', b'{"chunk_bytes": 6, "timeout_s": 5}', b"{}", b"[]"],
    ids=lambda terms: repr(terms[:20]),
)
def test_a_worker_takes_no_odd_terms(terms: bytes) -> None:
    ours, theirs = socket.socketpair()
    deadline = time.monotonic() + 10

    def aggregator() -> None:
        greet(theirs, bytes(32), deadline)
        said = json.loads(receive_part(theirs, deadline)[32:])
        send_part(theirs, proof("", b"aggregator", bytes.fromhex(said["nonce"]), terms) + terms, deadline)

    thread = threading.Thread(target=aggregator)
    thread.start()
    with ours, theirs:
        with pytest.raises(ProtocolError):
            introduce(ours, Introduction("x", "s", 1, 0, 5.0), "", bytes(range(32)), deadline)
        thread.join()


# one address among others


def test_one_address_ends_its_own_oldest_handshakes_and_nobody_elses() -> None:
    greetings = Greetings(most=5, per_address=3)
    pairs = [socket.socketpair() for _ in range(7)]
    begun = [greetings.begin(pair[0], "crowd") for pair in pairs[:4]]
    begun += [greetings.begin(pair[0], "other") for pair in pairs[4:6]]

    def ended(at: int) -> bool:
        pairs[at][1].setblocking(False)
        try:
            return pairs[at][1].recv(1) == b""
        except BlockingIOError:
            return False

    assert [ended(at) for at in range(6)] == [True, False, False, False, False, False]
    begun.append(greetings.begin(pairs[6][0], "third"))
    assert [ended(at) for at in range(1, 7)] == [True, False, False, False, False, False]
    assert len(greetings) == 5
    for greeting in begun:
        greetings.done(greeting)
    assert len(greetings) == 0
    for pair in pairs:
        for sock in pair:
            sock.close()


def come(
    server: AggregatorServer, session: str, workers: int, rank: int = 0, host: str = "127.0.0.1"
) -> AggregatorClient:
    """A worker of one of this machine's addresses; for the aggregator each is another host."""
    sock = socket.create_connection(parse_address(server.address), timeout=10, source_address=(host, 0))
    try:
        sock.sendall(PLAIN)
        who = Introduction("training", session, workers, rank, 20.0)
        terms = introduce(sock, who, "", bytes([rank]) * 32, time.monotonic() + 10)
    except ProtocolError:
        sock.close()
        raise
    return AggregatorClient(sock, **terms)


def summed(clients: list[AggregatorClient]) -> None:
    """A round of theirs, and their end."""

    def work(rank: int, client: AggregatorClient) -> None:
        values = np.full(9, rank + 1, np.int32)
        client.reduce_((ADD, values.view(np.uint8)))
        assert (values == sum(range(1, len(clients) + 1))).all()
        client.close()

    in_threads(clients, work)


def test_workers_that_are_announced_and_not_here_take_no_room() -> None:
    with AggregatorServer() as server:
        announced = [come(server, f"half {n}", 256) for n in range(8)]  # they would need more than all
        assert 8 * server.limits.job_bytes(256) > server.limits.memory_bytes
        summed([come(server, "whole", 3, rank, host=f"127.0.0.{2 + rank}") for rank in range(3)])
        summed([come(server, "many", 200, rank, host="127.0.0.9") for rank in range(200)])
        assert server.statistics()["failed"] == {}
        for client in announced:
            client.close()


def test_a_job_that_stays_incomplete_makes_room_where_others_ask_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with AggregatorServer(limits=AggregatorLimits(jobs=2)) as server:
        halves = [come(server, f"half {n}", 2) for n in range(2)]
        with pytest.raises(ProtocolError, match="no more than 2 jobs"):
            come(server, "early", 1)  # their other workers may still come
        monkeypatch.setattr("dynamix_homomorphic.aggregator.server.GATHER_S", 0.05)
        time.sleep(0.1)
        summed([come(server, "whole", 2, rank) for rank in range(2)])
        with pytest.raises(WireLost, match="closed"):
            halves[0].reduce_((OR, np.ones(9, np.uint8)))
        summed([halves[1], come(server, "half 1", 2, 1)])  # nobody needed its room
        eventually(lambda: server.statistics()["jobs"]["done"] == 2)
        assert server.statistics()["failed"] == {"stalled": 1}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"connections_per_address": 4}, "no more than 4 workers of one address at once: .*--connections-per-address"),
        (
            {"memory_bytes": 4 * AggregatorLimits().job_bytes(2)},
            "workers of one address have .* bytes, and may have .*--memory-mb",
        ),
        ({"jobs_per_address": 2}, "no more than 2 jobs of one address at once: .*--jobs-per-address"),
    ],
    ids=["connections", "bytes", "jobs"],
)
def test_one_address_leaves_room_for_others(more: dict[str, int], said: str) -> None:
    with AggregatorServer(limits=AggregatorLimits(**more)) as server:
        first = [[come(server, f"job {n}", 2, rank) for rank in range(2)] for n in range(2)]
        with pytest.raises(ProtocolError, match=said):
            come(server, "third", 2)
        summed([come(server, "others", 2, rank, host="127.0.0.2") for rank in range(2)])
        for job in first:
            summed(job)
        eventually(lambda: server.statistics()["jobs"]["done"] == 3)
        summed([come(server, "third", 2, rank) for rank in range(2)])


def test_one_job_of_one_address_may_have_all_of_the_memory() -> None:
    with AggregatorServer(limits=AggregatorLimits(memory_bytes=AggregatorLimits().job_bytes(3))) as server:
        summed([come(server, "s", 3, rank) for rank in range(3)])


def test_a_job_without_room_for_one_of_its_workers_leaves_it_to_another() -> None:
    """Both would fit alone. Without this each would hold what the other lacks."""
    limits = AggregatorLimits(memory_bytes=AggregatorLimits().job_bytes(6) + AggregatorLimits().job_bytes(2))
    with AggregatorServer(limits=limits) as server:
        one, other = [], []
        for rank in range(4):
            one.append(come(server, "one", 6, rank, host=f"127.0.0.{10 + rank}"))
            other.append(come(server, "other", 6, rank, host=f"127.0.0.{20 + rank}"))
        with pytest.raises(ProtocolError, match="--memory-mb"):
            come(server, "one", 6, 4)
        summed([*other, *(come(server, "other", 6, rank) for rank in (4, 5))])
        assert server.statistics()["failed"] == {"limit": 1}
        for client in one:
            client.close()


# coming back


@pytest.mark.parametrize("exchanges", [10, 1000, 100_000])
def test_however_often_it_is_lost_it_is_asked_for_in_a_small_part_of_all_exchanges(exchanges: int) -> None:
    """A loss costs a bucket's exchange once more, an agreement one small all-reduce."""
    waits, away = Backoff(), 0
    for _ in range(20):
        for _ in range(exchanges):
            waits.went_well()
        away += waits.longer()
    assert 2 * 20 / (20 * exchanges + away) < 0.05
