"""How one rank's slab becomes addressable by the others."""
