"""`dynamix bench gossip`: rounds that meet over parameters where no worker is in charge and no barrier exists."""
