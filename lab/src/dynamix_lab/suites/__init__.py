"""What prints figures."""
