"""The ranks of a job and their view of each other: groups, errors, who is alive, whether all are alike."""
