"""Utilisation of the GPU that torch calls by some index."""

from __future__ import annotations

import math
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dynamix.probes.device import DeviceProbe


def test_without_a_gpu_it_is_nan_and_says_why() -> None:
    assert math.isnan(DeviceProbe(torch.device("cpu")).sample()["device"])
    available, detail = DeviceProbe.detect()
    assert available == torch.cuda.is_available() or "driver" in detail or ".[gpu]" in detail


class Driver:
    """The part of NVML the probe talks to, for machines without one: GPUs known by UUID and PCI address."""

    class NVMLError(Exception):
        pass

    def __init__(self, busy: dict[bytes, int]) -> None:
        self.busy = busy

    def nvmlInit(self) -> None:  # noqa: N802
        pass

    def _find(self, key: bytes) -> bytes:
        if key not in self.busy:
            raise self.NVMLError("not found")
        return key

    nvmlDeviceGetHandleByUUID = nvmlDeviceGetHandleByPciBusId = _find  # noqa: N815

    def nvmlDeviceGetUtilizationRates(self, handle: bytes) -> Any:  # noqa: N802
        if self.busy[handle] < 0:
            raise self.NVMLError("not supported")
        return SimpleNamespace(gpu=self.busy[handle])


@pytest.fixture
def torch_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(uuid="0badcafe", pci_bus_id=0x3B, pci_domain_id=0, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)


@pytest.mark.usefixtures("torch_gpu")
@pytest.mark.parametrize(
    ("known", "expected"),
    [
        ({b"GPU-0badcafe": 70, b"00000000:3b:00.0": 1}, 0.7),
        ({b"00000000:3b:00.0": 40}, 0.4),  # a driver too old for torch's UUID
        ({b"GPU-other": 90}, math.nan),
        ({b"GPU-0badcafe": -1}, math.nan),
    ],
)
def test_the_gpu_is_found_by_uuid_or_pci_address(
    monkeypatch: pytest.MonkeyPatch, known: dict[bytes, int], expected: float
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Driver(known))
    assert DeviceProbe(torch.device("cuda", 0)).sample()["device"] == pytest.approx(expected, nan_ok=True)


@pytest.mark.usefixtures("torch_gpu")
def test_a_slice_does_not_report_the_whole_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-123")
    monkeypatch.setitem(sys.modules, "pynvml", Driver({b"GPU-0badcafe": 70, b"MIG-123": -1}))
    assert math.isnan(DeviceProbe(torch.device("cuda", 0)).sample()["device"])


@pytest.mark.gpu
def test_a_busy_gpu_reads_busy() -> None:
    if not DeviceProbe.detect()[0]:
        pytest.skip(DeviceProbe.detect()[1])
    probe = DeviceProbe()
    a = torch.randn(4096, 4096, device="cuda")
    for _ in range(500):
        a = a @ a
        a = a / a.norm()
    torch.cuda.synchronize()
    assert 0.0 < probe.sample()["device"] <= 1.0
