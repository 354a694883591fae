"""Coordination by traces: the excavation task of S-MADRL (arXiv 2510.03592), its learner and its baselines."""
