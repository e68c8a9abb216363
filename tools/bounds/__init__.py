"""What bounded waits and the abort word cost: kernels without them, and a comparison."""
