"""`pcie-comm bench`: the collectives of this library, beside what one would use instead.

The program is `program.main`, a run is `runner.Bench`. Nothing in the library needs this package
but the command line, and the ahead-of-time builder for its floors.
"""
