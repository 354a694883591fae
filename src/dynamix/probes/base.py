"""What a probe is, and which of them this machine can feed."""

from typing import Protocol, runtime_checkable

import torch


@runtime_checkable
class Probe(Protocol):
    """Measures something about one worker that its own step times do not tell."""

    name: str

    @classmethod
    def detect(cls) -> tuple[bool, str]:
        """(available, why; or how to make it so). Costs milliseconds at most and changes nothing."""

    def sample(self) -> dict[str, float]:
        """`Window` field -> value; rates are since the previous sample. NaN without data; never raises."""


def probe_types() -> list[type[Probe]]:
    """All kinds of probe that need no privileges. Those later in the list overrule the fields of those before."""
    from dynamix.probes.device import DeviceProbe
    from dynamix.probes.host import HostProbe
    from dynamix.probes.network import NetworkProbe

    return [HostProbe, DeviceProbe, NetworkProbe]


def detect(device: torch.device) -> list[Probe]:
    """Probes for a worker that computes on `device`, of every kind that has data on this machine, ready to be sampled.

    >>> [probe.name for probe in detect(torch.device("cpu"))][0]
    'host'
    """
    from dynamix.probes.device import DeviceProbe
    from dynamix_lab.probes.bpf import BpfProbe, wanted

    kinds = [kind for kind in probe_types() if kind is not DeviceProbe or device.type == "cuda"]
    kinds += [BpfProbe] if wanted() else []
    return [DeviceProbe(device) if kind is DeviceProbe else kind() for kind in kinds if kind.detect()[0]]


def probe_report() -> list[tuple[str, bool, str]]:
    """(name, available, detail) of every probe, as `dynamix doctor` shows it; the detail says what is measured, or how
    to enable it.

    >>> [name for name, _, _ in probe_report()]
    ['timing', 'host', 'device', 'network', 'bpf']
    """
    from dynamix_lab.probes.bpf import BpfProbe

    clock = f"CUDA events on {torch.cuda.get_device_name()}" if torch.cuda.is_available() else "CPU clock"
    kinds: list[type[Probe]] = [*probe_types(), BpfProbe]
    return [("timing", True, clock), *((kind.name, *kind.detect()) for kind in kinds)]
