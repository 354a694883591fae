"""Coordination by traces: a pheromone field, the excavation task of S-MADRL (arXiv 2510.03592), and a learner for it."""
