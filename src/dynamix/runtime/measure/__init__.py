"""Measurements of one rank's steps: the open window, loss and accuracy, the noise scale."""
