"""How the workers' work becomes one: gradients, sharded gradients, weights in the loss, parameters averaged."""
