"""The load of this worker's accelerator, from NVIDIA's management library."""

import contextlib
import importlib
import math
import os
from typing import Any

import torch

from dynamix.plugins import how_to_install


class DeviceProbe:
    """Share of time in which a kernel ran on this worker's GPU, over the driver's last sampling period (at most a
    second). NaN on other devices, and on slices of a partitioned GPU, for which the driver has no such count.

    The GPU is found by its UUID or PCI address, because the driver and torch count GPUs in different orders.
    """

    name = "device"

    def __init__(self, device: torch.device | None = None) -> None:
        self._handle = self._nvml = None
        if device is None and torch.cuda.is_available():
            device = torch.device("cuda", torch.cuda.current_device())
        if device is not None and device.type == "cuda":
            self._open(device)

    @classmethod
    def detect(cls) -> tuple[bool, str]:
        """(available, why or how)."""
        if not torch.cuda.is_available():
            return False, "torch sees no CUDA device here"
        try:
            pynvml: Any = importlib.import_module("pynvml")
        except ImportError:
            return False, f"needs NVIDIA's management library: {how_to_install('gpu')}"
        try:
            pynvml.nvmlInit()
            count = pynvml.nvmlDeviceGetCount()
            pynvml.nvmlShutdown()
        except pynvml.NVMLError as error:
            return False, f"the NVIDIA driver does not answer: {error}"
        return True, f"driver sees {count} GPU(s), torch {torch.cuda.device_count()}"

    def sample(self) -> dict[str, float]:
        """`device`, in [0, 1]."""
        if self._handle is None:
            return {"device": math.nan}
        try:
            busy = float(self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu) / 100.0
        except self._nvml.NVMLError:
            busy = math.nan
        return {"device": busy}

    def _open(self, device: torch.device) -> None:
        try:
            pynvml: Any = importlib.import_module("pynvml")
            pynvml.nvmlInit()
        except Exception:  # not installed, or no driver: `detect` tells which
            return
        self._nvml = pynvml
        for find, key in _addresses(device, pynvml):
            with contextlib.suppress(pynvml.NVMLError):
                self._handle = find(key)
                return


def _addresses(device: torch.device, nvml: Any) -> list[tuple[Any, bytes]]:
    """Ways to identify torch's `device` to the driver: (function, key), most reliable first."""
    properties = torch.cuda.get_device_properties(device)
    found: list[tuple[Any, bytes]] = []
    if (uuid := getattr(properties, "uuid", None)) is not None:
        found.append((nvml.nvmlDeviceGetHandleByUUID, f"GPU-{uuid}".encode()))
    if (bus := getattr(properties, "pci_bus_id", None)) is not None:
        domain, slot = getattr(properties, "pci_domain_id", 0), getattr(properties, "pci_device_id", 0)
        found.append((nvml.nvmlDeviceGetHandleByPciBusId, f"{domain:08x}:{bus:02x}:{slot:02x}.0".encode()))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    index = device.index if device.index is not None else torch.cuda.current_device()
    if index < len(visible) and visible[index].startswith("MIG-"):
        return [(nvml.nvmlDeviceGetHandleByUUID, visible[index].encode())]  # the whole GPU counts other slices
    return found
