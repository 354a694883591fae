"""Traffic of real sockets, and of real all-reduces over loopback."""

from __future__ import annotations

import itertools
import math
import os
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from dynamix.probes.network import NetworkProbe, parse_tcp_info
from tests.ranks import run_ranks

Pair = tuple[socket.socket, socket.socket]


def connect(stack: ExitStack, *, family: socket.AddressFamily = socket.AF_INET) -> Pair:
    host = "::1" if family == socket.AF_INET6 else "127.0.0.1"
    with socket.create_server((host, 0), family=family) as server:
        client = stack.enter_context(socket.create_connection(server.getsockname()[:2]))
        return client, stack.enter_context(server.accept()[0])


def send(pair: Pair, size: int, *, back: bool = False) -> None:
    source, sink = pair[::-1] if back else pair
    left = size
    while left:
        source.sendall(bytes(min(left, 16384)))
        got = 0
        while got < min(left, 16384):
            got += len(sink.recv(16384))
        left -= got
    time.sleep(0.01)  # the last acknowledgement


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a second passes between any two looks of a probe."""
    ticks = itertools.count(0.0, 0.5)
    monkeypatch.setattr("dynamix.probes.network.time", SimpleNamespace(perf_counter=lambda: next(ticks)))


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_this_machine_is_told_apart_from_one_that_counts_nothing() -> None:
    available, detail = NetworkProbe.detect()
    assert available, detail
    assert "no privileges" in detail


@pytest.mark.usefixtures("clock")
def test_bytes_are_counted_since_the_previous_sample(stack: ExitStack) -> None:
    pair = connect(stack)
    send(pair, 100_000)
    probe = NetworkProbe()
    send(pair, 400_000)
    sample = probe.sample()
    # Both ends are in this process: what one sends the other receives, and only sending counts.
    assert sample["bytes_per_s"] * 0.5 == pytest.approx(400_000, rel=0.2)
    assert 0 < sample["rtt_s"] < 0.1
    assert sample["retransmits_per_s"] >= 0
    assert probe.sample()["bytes_per_s"] == 0.0


@pytest.mark.usefixtures("clock")
def test_ipv6_and_connections_made_between_samples_count_from_their_start(stack: ExitStack) -> None:
    if not socket.has_ipv6 or not os.path.exists("/proc/net/if_inet6"):
        pytest.skip("this kernel has no IPv6")
    probe = NetworkProbe()
    send(connect(stack, family=socket.AF_INET6), 200_000)
    assert probe.sample()["bytes_per_s"] * 0.5 == pytest.approx(200_000, rel=0.2)


@pytest.mark.usefixtures("clock")
def test_small_talk_and_the_store_are_left_out(stack: ExitStack) -> None:
    ring, control, store = connect(stack), connect(stack), connect(stack)
    probe = NetworkProbe(store_port=store[0].getpeername()[1])
    send(ring, 300_000)
    send(control, 2_000)
    send(store, 300_000)
    assert probe.sample()["bytes_per_s"] * 0.5 == pytest.approx(300_000, rel=0.1)


@pytest.mark.usefixtures("clock")
def test_a_closed_connection_and_a_reused_descriptor(stack: ExitStack) -> None:
    old = connect(stack)
    send(old, 500_000)
    probe = NetworkProbe()
    numbers = {s.fileno() for s in old}
    for s in old:
        s.close()
    new = connect(stack)
    assert numbers & {s.fileno() for s in new}
    send(new, 50_000)
    assert 0 < probe.sample()["bytes_per_s"] * 0.5 < 80_000


def test_without_any_connection_everything_is_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynamix.probes.network.os.listdir", lambda _: [])
    assert all(math.isnan(value) for value in NetworkProbe().sample().values())


def test_kernels_with_a_shorter_or_longer_answer() -> None:
    full = bytearray(256)
    full[0] = 1
    struct.pack_into("=I", full, 68, 1500)
    struct.pack_into("=I", full, 100, 7)
    struct.pack_into("=QQ", full, 120, 11, 22)
    longest, short = parse_tcp_info(bytes(full)), parse_tcp_info(bytes(full[:104]))
    assert (longest.sent_bytes, longest.received_bytes, longest.retransmits) == (11, 22, 7)
    assert longest.rtt_s == pytest.approx(1.5e-3)
    assert (short.moved_bytes, short.retransmits) == (0, 7)
    assert parse_tcp_info(b"") is None
    full[0] = 10  # listening
    assert parse_tcp_info(bytes(full)) is None


@pytest.mark.multiproc
def test_an_all_reduce_moves_what_a_ring_moves() -> None:
    world_size = 3
    expected = 2 * (world_size - 1) / world_size * 10 * 4_000_000
    for one_group, two_groups, idle in run_ranks(_all_reduces, world_size):
        assert one_group == pytest.approx(expected, rel=0.2)
        assert two_groups == pytest.approx(2 * expected, rel=0.2)  # groups are summed
        assert idle < 0.01 * expected


def _all_reduces(rank: int) -> tuple[float, float, float]:
    second = dist.new_group(backend="gloo")
    payload = torch.ones(1_000_000)
    for group in (None, second):
        dist.all_reduce(payload, group=group)
    dist.barrier()
    moved, ticks = [], itertools.count(0.0, 0.5)
    with mock.patch("dynamix.probes.network.time", SimpleNamespace(perf_counter=lambda: next(ticks))):
        probe = NetworkProbe()
        for groups in ((None,), (None, second), ()):
            dist.barrier()
            probe.sample()
            for group in groups:
                for _ in range(10):
                    dist.all_reduce(payload, group=group)
            time.sleep(0.05)
            sample = probe.sample()
            moved.append(sample["bytes_per_s"] * 0.5)
            if groups:
                assert 0 < sample["rtt_s"] < 1.0
    dist.barrier()
    return moved[0], moved[1], moved[2]
