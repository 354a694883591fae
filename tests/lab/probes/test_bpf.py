"""The optional eBPF probe: what it says where it cannot run, and how it reads its tracer."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from dynamix.probes import probe_report, probes_here
from dynamix_lab.probes.bpf import BpfProbe


def test_what_is_missing_is_said_with_how_to_enable_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    available, detail = BpfProbe.detect()
    assert not available
    assert "apt-get install bpftrace" in detail
    assert "root" in detail
    assert ("bpf", available, detail) in probe_report()
    assert BpfProbe().sample() == {}
    for asked in ("0", "1"):  # what TCP says stays unless it is asked for and can be had
        monkeypatch.setenv("DYNAMIX_BPF", asked)
        assert "bpf" not in [probe.name for probe in probes_here(torch.device("cpu"))]


FAKE = """#!/bin/sh
echo '{"type": "attached_probes", "data": {"probes": 3}}'
echo 'Lost 3 events'
while true; do
  echo '{"type": "map", "data": {"@again": {"5001,6001": 3, "7,8": 100}}}'
  echo '{"type": "map", "data": {"@sent": 1000}}'
  echo '{"type": "printf", "data": "told\\\\n"}'
  sleep 0.02
done
"""


def test_only_own_connections_count_and_a_dead_tracer_leaves_it_to_tcp_info(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "bpftrace"
    tool.write_text(FAKE)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(BpfProbe, "detect", classmethod(lambda cls: (True, "")))
    monkeypatch.setattr(BpfProbe, "_connections", lambda self: {(5001, 6001)})
    probe = BpfProbe()
    assert probe._tracer is not None
    ended = probe._tracer
    while not probe._told:
        ended.poll()
    probe.sample()
    again = sent = 0.0
    for _ in range(3):
        subprocess.run(["sleep", "0.2"], check=True)
        sample = probe.sample()
        again, sent = again + sample["retransmits_per_s"], sent + sample["bytes_per_s"]
    assert 0 < again / 3 < 300  # 3 every 20 ms and what a shell takes besides
    assert sent == pytest.approx(again * 1000 / 3, rel=0.3)  # 3 beside 1,000 bytes, never 100 more
    ended.kill()
    ended.wait(5)
    assert probe.sample() == {}
    probe.close()
    probe.close()
