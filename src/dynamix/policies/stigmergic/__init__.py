"""Workers that decide for themselves, from their own metrics and decaying traces in a shared field (arXiv 2510.03592)."""
