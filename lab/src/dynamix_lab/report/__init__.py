"""Pages and tables made of results."""
