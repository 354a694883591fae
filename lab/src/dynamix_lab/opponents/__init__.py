"""The methods that a practitioner would train with instead, tuned as much as ours: on the virtual clock and on real
ranks."""
