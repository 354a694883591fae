"""Whether a loop does what was planned, and whether its losses are weighted once."""
