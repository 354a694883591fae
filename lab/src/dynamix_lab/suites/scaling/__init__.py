"""`dynamix bench scaling --cluster virtual`: the tables of the DYNAMIX paper by real training on the virtual clock."""
