"""What a job would do under any allocation: costs, exchange, noise, and the best split."""
