"""`dynamix bench stigmergy`: workers that decide for themselves compared with central policies."""
