"""Learning rates that follow the global batch, and schedules that count samples."""
