"""Checkpoints: what they hold, how they are packed, checked as a whole, and loaded."""
