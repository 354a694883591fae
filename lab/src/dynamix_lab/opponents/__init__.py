"""The methods that a practitioner would otherwise use, tuned as much as ours: on the virtual clock and on real
ranks."""
