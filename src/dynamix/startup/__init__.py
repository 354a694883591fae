"""Python runs this at its start in processes that somebody wants to be called in. Standard library alone.

This folder is put on a process's PYTHONPATH, so that Python runs `sitecustomize` at its start. It imports nobody: the
environment names who is called.
"""
