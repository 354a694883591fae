"""How many steps workers that step apart take between two meetings, against every fixed number of them."""
