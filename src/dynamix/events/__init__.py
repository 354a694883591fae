"""Records that a run writes while it runs."""
