"""`dynamix bench overhead`: the cost of dynamix compared with plain DDP."""
