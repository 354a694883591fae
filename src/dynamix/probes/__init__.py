"""Measurements that a worker makes of itself: time, host, device, network."""

from dynamix.probes.base import Probe, probe_report
from dynamix.probes.base import detect as probes_here
from dynamix.probes.timing import StepTimer, StepTimes, attribute_wait

__all__ = ["Probe", "StepTimer", "StepTimes", "attribute_wait", "probe_report", "probes_here"]
