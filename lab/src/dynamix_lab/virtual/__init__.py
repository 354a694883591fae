"""The virtual clock: real training in one process, on the time of simulated workers."""
