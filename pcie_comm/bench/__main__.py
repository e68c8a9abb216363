"""`python -m pcie_comm.bench` is `pcie-comm bench`, also where typer is not installed."""

from __future__ import annotations

import sys

from .program import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
