"""The interface of a probe, and the probes that work on this machine."""

from typing import Protocol, runtime_checkable

import torch

from dynamix.plugins import PROBES, load_all


@runtime_checkable
class Probe(Protocol):
    """Measures something about one worker that its step times do not show."""

    name: str

    @classmethod
    def detect(cls) -> tuple[bool, str]:
        """(available, why; or how to enable it). Takes milliseconds at most and changes nothing."""

    def sample(self) -> dict[str, float]:
        """`Window` field -> value; rates are since the previous sample. NaN without data; never raises."""


def probe_types() -> list[type[Probe]]:
    """All kinds of probe that need no privileges. If two measure the same field, the later one wins."""
    from dynamix.probes.device import DeviceProbe
    from dynamix.probes.host import HostProbe
    from dynamix.probes.network import NetworkProbe

    return [HostProbe, DeviceProbe, NetworkProbe]


def detect(device: torch.device) -> list[Probe]:
    """Probes for a worker that computes on `device`: one of each kind that has data here, ready to be sampled.

    >>> [probe.name for probe in detect(torch.device("cpu"))][0]
    'host'
    """
    from dynamix.probes.device import DeviceProbe

    kinds = [kind for kind in probe_types() if kind is not DeviceProbe or device.type == "cuda"]
    kinds += [kind for kind in _brought() if _wanted(kind)]
    return [DeviceProbe(device) if kind is DeviceProbe else kind() for kind in kinds if kind.detect()[0]]


def probe_report() -> list[tuple[str, bool, str]]:
    """(name, available, detail) of every probe, as `dynamix doctor` shows it; the detail says what is measured, or how
    to enable it.

    >>> [name for name, _, _ in probe_report()][:4]
    ['timing', 'host', 'device', 'network']
    """
    clock = f"CUDA events on {torch.cuda.get_device_name()}" if torch.cuda.is_available() else "CPU clock"
    return [("timing", True, clock), *((kind.name, *kind.detect()) for kind in [*probe_types(), *_brought()])]


def _brought() -> list[type[Probe]]:
    """Kinds of probe from other distributions, by entry point."""
    return list(load_all(PROBES, ("timing", *(kind.name for kind in probe_types()))).values())


def _wanted(kind: type[Probe]) -> bool:
    """Whether it should run: a probe with a cost may have a class method `wanted` that answers this."""
    return bool(getattr(kind, "wanted", lambda: True)())
