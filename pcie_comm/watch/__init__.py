"""Who of a group is still there: deaths and aborts of ranks, seen by a watchdog thread.

docs/failure.md explains the design, watch.py is the part that a group uses.
"""
