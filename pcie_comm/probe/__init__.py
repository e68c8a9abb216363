"""What the ways between GPUs really do: verify and measure, on a machine that has them."""
