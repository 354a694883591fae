"""`dynamix bench stigmergy`: workers that decide for themselves against central policies."""
