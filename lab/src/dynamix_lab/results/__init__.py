"""Committed results: the folder results/NAME, and the tables of the docs made from it."""
