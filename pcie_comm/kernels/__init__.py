"""Collectives as plugins: what moves where, on the device and in plain torch."""
