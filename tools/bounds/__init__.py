"""What bounded waits, and counters, cost: kernels without the former, and comparisons."""
