"""What a training job holds: the controller, and what the ranks do together behind it."""
