"""`dynamix bench faults`: what a job does when something breaks under it."""
