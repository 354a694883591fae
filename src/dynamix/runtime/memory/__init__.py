"""How large a batch fits: every rank's limit, found before training."""
