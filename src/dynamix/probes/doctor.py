"""What `dynamix doctor` says about probes."""

from __future__ import annotations

import torch

from dynamix.probes.base import Probe, probe_types
from dynamix.probes.bpf import BpfProbe


def probe_report() -> list[tuple[str, bool, str]]:
    """(name, available, detail) of every probe; the detail says what is measured, or how to enable it.

    >>> [name for name, _, _ in probe_report()]
    ['timing', 'host', 'device', 'network', 'bpf']
    """
    if torch.cuda.is_available():
        clock = f"CUDA events on {torch.cuda.get_device_name()}"
    else:
        clock = "CPU clock"
    kinds: list[type[Probe]] = [*probe_types(), BpfProbe]
    return [("timing", True, clock), *((kind.name, *kind.detect()) for kind in kinds)]
