"""What a cubin says of itself. It is an ELF file of 64 bits.

cuobjdump prints the same numbers; the tests compare.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

_EXECUTABLE = 0x4  # SHF_EXECINSTR
_CUDA_INFO = 0x7000_0000  # SHT_CUDA_INFO, the sections `.nv.info.*`
_SIZED = 4  # form of a record: the size of what follows; any other form holds the value itself
_REGISTERS = 0x2F  # attribute of a record: symbol, registers


def _sections(cubin: bytes) -> Iterator[tuple[int, int, int, int]]:
    """Yield kind, flags, start and size of every section."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    entry_nbytes, count = struct.unpack_from("<HH", cubin, 0x3A)
    for index in range(count):
        where = table + index * entry_nbytes + 4
        kind, flags, _, start, nbytes = struct.unpack_from("<IQQQQ", cubin, where)
        yield kind, flags, start, nbytes


def sass_nbytes(cubin: bytes) -> int:
    """Return the size of the machine instructions of all functions, padding included."""
    return sum(nbytes for _, flags, _, nbytes in _sections(cubin) if flags & _EXECUTABLE)


def max_registers(cubin: bytes) -> int:
    """Return the registers per thread that the largest function uses; 0 if it does not say."""
    most = 0
    for kind, _, start, nbytes in _sections(cubin):
        if kind != _CUDA_INFO:
            continue
        position = start
        while position < start + nbytes:
            form, attribute, value = struct.unpack_from("<BBH", cubin, position)
            position += 4
            if form != _SIZED:
                continue
            if attribute == _REGISTERS:
                most = max(most, struct.unpack_from("<II", cubin, position)[1])
            position += value
    return most
