"""Policies in the form of the papers that this project begins with."""
