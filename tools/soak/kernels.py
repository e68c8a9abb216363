"""Kernels for a soak: the library's, with some device functions replaced, built ahead of time.

The store takes them from PCIE_COMM_KERNELS (or Config.kernels_dir) like any others: a fingerprint
is of the source files, which stay as they are. So never leave such a folder where a job finds it.

`delay`: blocks spin now and then, up to 16 µs, between staging and signal, before they announce a
tagged push, and between the wait and the first read. The protocol is whole.

`one_slot`: the same delays, and the payload of every launch lies in slot 0. Flags still take turns,
or ranks would only wait for flags that were overwritten. Push and pull: wrong bytes. Tagged push: a
unit is overwritten before it was read, its tag too, and who awaits that tag times out.

`early_flag`: the same delays, and push and pull raise the flag before they stage. A flag of tagged
push publishes nothing; what publishes there is the tag, so each unit's tags are stored first.

Usage: python tools/soak/kernels.py --arch sm_90a --out build/soak_kernels
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from cutlass import Int32, Int64, Uint32, cute  # noqa: E402 - a script: it finds the package first
from cutlass.cutlass_dsl import dsl_user_op  # noqa: E402

from pcie_comm.kernels import compile as compiler  # noqa: E402
from pcie_comm.kernels import primitives as prim  # noqa: E402
from pcie_comm.kernels import scalars as num  # noqa: E402
from pcie_comm.kernels.collective import KernelKey  # noqa: E402
from pcie_comm.kernels.fused_kernels import RouterBlock  # noqa: E402
from pcie_comm.kernels.protocol import Lane  # noqa: E402
from pcie_comm.kernels.registry import find  # noqa: E402
from pcie_comm.kernels.tagged import TaggedGather  # noqa: E402
from pcie_comm.layout import SlabLayout  # noqa: E402

OPS = ("all_gather_pair", "all_gather_heads", "all_gather_pair_kimi_topk")
ONE_IN = 8
"""Of so many blocks and places, one spins."""

LONGEST_NS = 1 << 14

Replaced = Sequence[tuple[Any, str, Callable[..., Any]]]
"""Where, which name, and what takes its place."""

_announce, _enter, _exchange = Lane.announce, Lane.enter, Lane.exchange
_gather, _select = TaggedGather.collect, RouterBlock.collect


def _mixed(number: Uint32) -> Uint32:
    """Return 32 bits that look random (the finalizer of MurmurHash3)."""
    number = (number ^ (number >> Uint32(16))) * Uint32(0x85EBCA6B)
    number = (number ^ (number >> Uint32(13))) * Uint32(0xC2B2AE35)
    return number ^ (number >> Uint32(16))


@cute.jit
def spin(seed: Uint32) -> None:
    """Spin for up to LONGEST_NS, by the wall clock, in one of ONE_IN cases."""
    drawn = _mixed(seed)
    if (drawn & Uint32(ONE_IN - 1)) == Uint32(0):
        until = prim.global_timer() + num.wide(Int32((drawn >> Uint32(8)) & Uint32(LONGEST_NS - 1)))
        now = prim.global_timer()
        while now < until:
            now = prim.global_timer()


def dawdle(lane: Lane, place: int) -> None:
    """Spin by rank, epoch, block and place. Participants: any threads, a block spins together."""
    spin(lane.epoch * Uint32(64) + Uint32(lane.rank * Int32(4) + Int32(place)) + Uint32(lane.block))


def slow_exchange(lane: Lane, ok: Uint32) -> Uint32:
    """Dawdle between staging and signal, and between the wait and the first read."""
    dawdle(lane, 0)
    ok = _exchange(lane, ok)
    dawdle(lane, 1)
    return ok


def slow_announce(lane: Lane) -> None:
    """Tell the peers late which call this is. Participants: the last warp."""
    dawdle(lane, 2)
    _announce(lane)


def slow_gather(gather: TaggedGather, ok: Uint32) -> Any:
    """Look late for the units."""
    dawdle(gather.lane, 3)
    return _gather(gather, ok)


def slow_select(router: RouterBlock, ok: Uint32) -> Any:
    """Look late for the records."""
    dawdle(router.lane, 3)
    return _select(router, ok)


def enter_slot_0(lane: Lane) -> None:
    """Enter as always, but put the payload into slot 0 whatever the epoch is."""
    _enter(lane)
    slot_nbytes = lane._words[1]
    place = Int64(2 if lane.tagged else 0)
    lane.slot_offset = Int64(SlabLayout.SLOTS_OFFSET) + place * Int64(slot_nbytes)


@cute.jit
def _raise_flags(lane: Lane) -> None:
    if lane.ok != Uint32(0) and lane.thread < lane.world_size and lane.thread != lane.rank:
        prim.signal(lane.peer(lane.thread) + lane._flag_offset(lane.rank), lane.flag)


def enter_with_flags(lane: Lane) -> None:
    """Enter, and raise the flags at once; `exchange` raises them again, which changes nothing."""
    _enter(lane)
    if not lane.tagged:
        _raise_flags(lane)


@dsl_user_op
def _store_words(
    address: Int64, words: tuple, enabled: Uint32, *, loc: Any = None, ip: Any = None
) -> None:
    """Store two words, 8 bytes apart, if `enabled` is not 0."""
    at = {"loc": loc, "ip": ip}
    text = (
        "{\n.reg .pred p;\nsetp.ne.u32 p, $3, 0;\n"
        "@p st.relaxed.sys.global.u32 [$0], $1;\n@p st.relaxed.sys.global.u32 [$0+8], $2;\n}"
    )
    operands = [Int64(address).ir_value(**at)]
    operands += [Uint32(word).ir_value(**at) for word in (*words, enabled)]
    prim.asm(None, operands, text, "l,r,r,r", effects=True, **at)


def store_tags_first(address: Int64, data: tuple, tag: Uint32, enabled: Uint32) -> None:
    """Store a unit's tags, dawdle, and store its data."""
    _store_words(address + Int64(4), (tag, tag), enabled)
    spin(tag * Uint32(64) + Uint32(Int32(address)))
    _store_words(address, data, enabled)


DELAY: Replaced = (
    (Lane, "exchange", slow_exchange),
    (Lane, "announce", slow_announce),
    (TaggedGather, "collect", slow_gather),
    (RouterBlock, "collect", slow_select),
)
VARIANTS: dict[str, Replaced] = {
    "delay": DELAY,
    "one_slot": (*DELAY, (Lane, "enter", enter_slot_0)),
    "early_flag": (
        *DELAY,
        (Lane, "enter", enter_with_flags),
        (prim, "store_unit", store_tags_first),
    ),
}


@contextmanager
def replaced(functions: Replaced) -> Iterator[None]:
    """Have kernels that are built meanwhile use other device functions."""
    with ExitStack() as stack:
        for place, name, function in functions:
            stack.enter_context(mock.patch.object(place, name, function))
        yield


def build(variant: str, key: KernelKey, arch: str) -> compiler.CompiledKernel:
    """Compile one kernel of a variant."""
    with replaced(VARIANTS[variant]):
        return compiler.build(find(key.op), key, arch)


def main(argv: Sequence[str] | None = None) -> int:
    """Build every kernel that a soak may need, of every variant, each into a folder of its name."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--arch", default="sm_90a")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "soak_kernels")
    options = parser.parse_args(argv)
    keys = [key for op in OPS for key in find(op).variants()]
    for variant in VARIANTS:
        for key in keys:
            compiler.write(build(variant, key, options.arch), options.out / variant)
        print(f"{variant}: {len(keys)} kernels for {options.arch} in {options.out / variant}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
