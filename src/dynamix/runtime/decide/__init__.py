"""The way from a closed window to the next allocation: it is agreed on, decided, and put in force."""
