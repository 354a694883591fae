"""Workers decide for themselves, from own metrics and the traces that all leave in one field (arXiv 2510.03592)."""
