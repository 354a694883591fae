"""State that is equal on all ranks of a job, and checks that it is."""
