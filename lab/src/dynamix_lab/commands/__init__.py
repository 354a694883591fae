"""Commands of the laboratory: `dynamix bench ...` and `dynamix demo`, found by entry point.

Each module adds its commands to `bench` when it is imported. A command imports its measurement code when it runs.
"""

from dynamix_lab.commands import experiment, papers, peers, removed, results, suites
from dynamix_lab.commands.demo import demo
from dynamix_lab.commands.group import bench

__all__ = ["bench", "demo", "experiment", "papers", "peers", "removed", "results", "suites"]
