"""What Python runs at its start in processes that dynamix paces or observes. Standard library alone.

This folder is put on a process's PYTHONPATH, so that Python runs `sitecustomize` at its start.
"""
