"""Workers decide for themselves, from their own metrics and traces in one shared field (arXiv 2510.03592)."""
