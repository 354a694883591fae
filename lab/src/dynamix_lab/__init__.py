"""The laboratory of dynamix: suites, experiments, peers, tasks, and how their results become tables."""
