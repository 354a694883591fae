"""`dynamix bench compression`: gradient exchanges side by side."""
