"""Simulated clusters, C at once: compute, network, statistics of training, disturbances, and their environment."""

from dynamix.simulator.clusters import Clusters, bounds_of, sample_clusters
from dynamix.simulator.env import ClusterEnv
from dynamix.simulator.reference import LaggedReference, best_allocation

__all__ = ["ClusterEnv", "Clusters", "LaggedReference", "best_allocation", "bounds_of", "sample_clusters"]
