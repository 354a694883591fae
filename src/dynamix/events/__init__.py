"""The records that a run writes while it goes on."""
