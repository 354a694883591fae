"""The laboratory of dynamix: suites, experiments, other libraries, tasks, and tables of their results."""
