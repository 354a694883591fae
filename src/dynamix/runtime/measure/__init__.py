"""What one rank observes of its steps: the open window, loss and accuracy, the noise scale."""
