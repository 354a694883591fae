"""Ranks of peers. They run in the peer's own interpreter, as the package `jobs`, where dynamix is not installed."""
