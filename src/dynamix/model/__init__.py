"""Predicts a job under any allocation: costs, exchange, noise, and the best split."""

from dynamix.model.jobmodel import JobModel
from dynamix.model.outcome import log_goodput

__all__ = ["JobModel", "log_goodput"]
