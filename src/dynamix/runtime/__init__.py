"""The parts of a training job: the controller, and what the ranks do together behind it."""
