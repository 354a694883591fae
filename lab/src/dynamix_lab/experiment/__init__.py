"""One experiment: rows at places with seeds, on a cluster, declared in `experiments/NAME.toml`."""
