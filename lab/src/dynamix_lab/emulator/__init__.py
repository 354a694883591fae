"""Real processes and real sockets on one machine, each rank on its own emulated host."""

from dynamix_lab.emulator.cluster import Emulation
from dynamix_lab.emulator.loading import load_scenario, scenario_schema, shipped_scenarios
from dynamix_lab.emulator.mechanisms import probe_mechanisms
from dynamix_lab.emulator.run import emulate
from dynamix_lab.emulator.scenario import Change, Device, Host, Load, Neighbour, Scenario, Trace
from dynamix_lab.emulator.schedule import Link, host_links, host_speeds

__all__ = [
    "Change",
    "Device",
    "Emulation",
    "Host",
    "Link",
    "Load",
    "Neighbour",
    "Scenario",
    "Trace",
    "emulate",
    "host_links",
    "host_speeds",
    "load_scenario",
    "probe_mechanisms",
    "scenario_schema",
    "shipped_scenarios",
]
