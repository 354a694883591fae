"""Experiments, declared in TOML files."""
