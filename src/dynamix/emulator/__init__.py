"""Real processes and real sockets on one machine, each rank on an emulated host of its own."""

from dynamix.emulator.cluster import Emulation
from dynamix.emulator.scenario import Host, Neighbour, Scenario, host_speeds, load_scenario, shipped_scenarios

__all__ = ["Emulation", "Host", "Neighbour", "Scenario", "host_speeds", "load_scenario", "shipped_scenarios"]
