"""Simulated clusters, C at once: compute, network, statistics of training, disturbances, and their environment."""

from dynamix.simulator.calibration import calibration
from dynamix.simulator.clusters import Clusters, bounds_of, sample_clusters
from dynamix.simulator.disturbances import SlowdownTrace
from dynamix.simulator.env import ClusterEnv, rollout, rollout_path
from dynamix.simulator.families import (
    BREAKING,
    CONFORMING,
    DEVELOPMENT,
    FAMILIES,
    TRAINING,
    interior_share,
    sample_family,
    with_lengths,
)
from dynamix.simulator.reference import (
    REFERENCES,
    GreedyReference,
    HedgedReference,
    LaggedReference,
    PlannedReference,
    best_allocation,
)
from dynamix.simulator.statistics import Generalisation

__all__ = [
    "BREAKING",
    "CONFORMING",
    "DEVELOPMENT",
    "FAMILIES",
    "REFERENCES",
    "TRAINING",
    "ClusterEnv",
    "Clusters",
    "Generalisation",
    "GreedyReference",
    "HedgedReference",
    "LaggedReference",
    "PlannedReference",
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
