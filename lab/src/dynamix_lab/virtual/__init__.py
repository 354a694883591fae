"""The virtual clock: real training in one process, with times of simulated workers."""
