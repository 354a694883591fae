"""Probes that need more of a machine than training jobs should ask for."""
