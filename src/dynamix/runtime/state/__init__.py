"""What a checkpoint holds, how it is packed, checked as a whole, and loaded."""
