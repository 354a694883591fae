"""dynamix: adaptive per-worker batch sizes for synchronous data-parallel PyTorch training."""
