"""Damaged inputs: each gives an error of ours, or loads to what is written again alike."""
