"""Workers decide for themselves, from own metrics and decaying traces in a shared field (arXiv 2510.03592)."""
