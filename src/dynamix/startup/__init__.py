"""Python runs this at the start of processes in which functions are to be called with torch. Standard library alone.

This folder is put on a process's PYTHONPATH, so that Python runs `sitecustomize` at its start. It depends on none of
the functions: the environment names them.
"""
