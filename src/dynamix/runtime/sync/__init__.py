"""Synchronises the workers: gradients, sharded gradients, weights in the loss, averaged parameters."""
