"""What a host really is: its PCIe tree, links, labels, faults, and what follows for a group.

Nothing here imports torch or CUDA, needs root or changes a setting. `pcie-comm topo`, `doctor` and
`advise` are its programs; docs/topology.md explains them.
"""
