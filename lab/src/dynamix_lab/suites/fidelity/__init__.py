"""`dynamix bench fidelity`: the simulator against measurements and against the emulator."""
