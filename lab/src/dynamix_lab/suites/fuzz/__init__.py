"""Damaged inputs: each must raise an error of ours, or load as data that is written again unchanged."""
