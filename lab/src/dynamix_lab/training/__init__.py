"""How policies are learned in the simulator."""
