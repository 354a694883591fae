"""`dynamix bench fidelity`: the simulator against measurements, and what hosts behind quotas cost."""
