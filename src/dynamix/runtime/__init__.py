"""The parts of a training job: the controller, and the objects behind it on each rank."""
