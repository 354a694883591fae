"""Real processes and real sockets on one machine, each rank on an emulated host of its own."""

from dynamix.emulator.cluster import Emulation
from dynamix.emulator.mechanisms import probe_mechanisms
from dynamix.emulator.run import emulate
from dynamix.emulator.scenario import Host, Neighbour, Scenario, host_speeds, load_scenario, shipped_scenarios

__all__ = [
    "Emulation",
    "Host",
    "Neighbour",
    "Scenario",
    "emulate",
    "host_speeds",
    "load_scenario",
    "probe_mechanisms",
    "shipped_scenarios",
]
