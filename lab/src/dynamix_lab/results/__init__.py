"""Results that are stored in the repository's results/, and their tables in the docs."""
