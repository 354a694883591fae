"""The aggregator as a service: what it carries beside its line and its memory, and what hostile frames do to it."""
