"""From a closed window to the next allocation: agree, decide, and apply."""
