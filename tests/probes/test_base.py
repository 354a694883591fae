"""What all probes promise."""

from __future__ import annotations

import socket
import time
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from dynamix.probes import Probe, probe_report, probes_here
from dynamix.probes.base import probe_types
from dynamix.window import PER_WORKER


@pytest.mark.parametrize("kind", probe_types())
def test_every_probe_answers_in_window_fields_and_never_raises(kind: Any) -> None:
    available, detail = kind.detect()
    assert isinstance(available, bool)
    assert detail
    probe = kind()
    assert isinstance(probe, Probe)
    for _ in range(3):  # also immediately after the previous sample
        sample = probe.sample()
        assert set(sample) <= set(PER_WORKER)
        assert all(isinstance(value, float) for value in sample.values())


def test_no_two_probes_answer_for_the_same_field() -> None:
    fields = [field for kind in probe_types() for field in kind().sample()]
    assert len(fields) == len(set(fields))


def test_a_cpu_worker_gets_no_probe_of_gpus() -> None:
    assert "device" not in [probe.name for probe in probes_here(torch.device("cpu"))]


def test_report_names_every_probe_with_a_reason() -> None:
    report = probe_report()
    assert [name for name, _, _ in report] == ["timing", "host", "device", "network", "bpf"]  # bpf is the laboratory's
    assert all(detail for _, _, detail in report)


def test_a_sample_of_everything_with_many_descriptors_is_cheap() -> None:
    """Fails only where the cost is out of all proportion, since machines are shared."""
    with ExitStack() as stack:
        for _ in range(32):
            for end in socket.socketpair():
                stack.enter_context(end)
        probes, costs = probes_here(torch.device("cpu")), []
        for _ in range(30):
            started = time.perf_counter()
            for probe in probes:
                probe.sample()
            costs.append(time.perf_counter() - started)
    assert sorted(costs)[15] < 0.02
