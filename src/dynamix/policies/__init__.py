"""Policies: they map a window to the next allocation. Each module is named by its field term."""

from dynamix.policies.protocol import Policy
from dynamix.policies.registry import make_policy, policy_names

__all__ = ["Policy", "make_policy", "policy_names"]
