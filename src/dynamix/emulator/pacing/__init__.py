"""The part of a device host that lives inside its rank. Standard library alone until torch is there.

This folder is put on a rank's PYTHONPATH, so that Python runs `sitecustomize` at its start.
"""
