"""What the ranks of a job know of each other: groups, errors, who is alive, whether all are alike."""
