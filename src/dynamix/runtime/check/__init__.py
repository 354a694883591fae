"""Checks that a loop does what the plan says, and that its losses are weighted exactly once."""
