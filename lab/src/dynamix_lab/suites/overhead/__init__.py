"""`dynamix bench overhead`: what dynamix costs a job, beside plain DDP."""
