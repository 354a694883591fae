"""`dynamix bench faults`: what a job does when a part of it breaks."""
