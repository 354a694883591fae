"""From a closed window to the next allocation: agreed on, decided, and put in force."""
