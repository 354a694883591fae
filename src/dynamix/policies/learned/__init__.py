"""Policies with a network: a residual around the goodput rule, and the paper's additive form."""
