"""Training of policies in the simulator."""
