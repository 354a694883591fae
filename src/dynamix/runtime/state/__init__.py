"""Checkpoints: contents, packing, a check of the whole state, and loading."""
