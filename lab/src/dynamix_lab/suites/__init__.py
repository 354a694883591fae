"""The suites that print figures."""
