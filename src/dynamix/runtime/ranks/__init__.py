"""Communication between a job's ranks: groups, errors, liveness, and comparisons of their state."""
