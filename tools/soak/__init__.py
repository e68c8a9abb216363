"""Stress: mixed calls with random delays, for as long as asked; every output is compared.

`python tools/soak --help` says how to run it. Controls break the protocol on purpose, on the CPU by
a changed engine, on a GPU by kernels that kernels.py builds: they must be caught.
"""
