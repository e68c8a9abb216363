"""`python -m pcie_comm` is the program `pcie-comm`."""

import sys

from .cli import main

sys.exit(main())
