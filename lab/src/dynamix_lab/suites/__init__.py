"""The suites that produce the project's figures."""
