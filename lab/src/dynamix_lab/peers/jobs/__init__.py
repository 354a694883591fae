"""Ranks of peers. They run in the peer's own interpreter, as the package `jobs`. dynamix is not installed there."""
