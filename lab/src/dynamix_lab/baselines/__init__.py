"""Other authors' policies, reimplemented from their papers: baselines for dynamix."""
