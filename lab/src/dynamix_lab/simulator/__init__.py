"""Simulated clusters, C at once: compute, network, training statistics, disturbances, and their environment."""

from dynamix_lab.simulator.calibration import calibration
from dynamix_lab.simulator.clusters import Clusters, bounds_of, sample_clusters
from dynamix_lab.simulator.disturbances import SlowdownTrace
from dynamix_lab.simulator.env import ClusterEnv, rollout, rollout_path
from dynamix_lab.simulator.families import (
    BREAKING,
    CONFORMING,
    DEVELOPMENT,
    FAMILIES,
    TRAINING,
    interior_share,
    sample_family,
    with_lengths,
)
from dynamix_lab.simulator.reference import (
    HedgedReference,
    LaggedReference,
    best_allocation,
)
from dynamix_lab.simulator.statistics import Generalisation

__all__ = [
    "BREAKING",
    "CONFORMING",
    "DEVELOPMENT",
    "FAMILIES",
    "TRAINING",
    "ClusterEnv",
    "Clusters",
    "Generalisation",
    "HedgedReference",
    "LaggedReference",
    "SlowdownTrace",
    "best_allocation",
    "bounds_of",
    "calibration",
    "interior_share",
    "rollout",
    "rollout_path",
    "sample_clusters",
    "sample_family",
    "with_lengths",
]
