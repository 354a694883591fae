"""Starts a job's ranks on emulated hosts and follows them to the end."""
