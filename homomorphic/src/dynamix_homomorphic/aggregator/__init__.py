"""A process in the network that sums and ORs gradients for many jobs, and a worker's connection to it."""
