"""One rank's measurements: the open window, loss and accuracy, the noise scale."""
