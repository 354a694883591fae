"""Studies of learned policies and of tasks of their own."""
