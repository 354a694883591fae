"""`dynamix bench compression`: gradient exchanges compared."""
