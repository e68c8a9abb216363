"""Everything a kernel does to memory: the only file with memory order and scope.

Addresses are plain 64-bit integers (global) or 32-bit integers (shared); there is no tensor type
on the device. Two families of global access exist, and mixing them up is the bug class this file
prevents:

* `load_*` / `store_*`: weak accesses, for tensors and for staging that a release will cover;
* `load_peer_*`: relaxed at system scope, for bytes another rank wrote. Never served by a stale L1
  line, never through the read-only path.

`signal` and `poll` are the only release and acquire. Peer memory sees plain loads and stores only:
PCIe peers have no remote atomics. The atomics here work on this rank's control block.
"""

from __future__ import annotations

from typing import Any

from cutlass import Float32, Int32, Int64, Uint32, Uint64, cute
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op


def asm(
    result: Any, operands: list[Any], text: str, constraints: str, *, effects: bool, **at: Any
) -> Any:
    """Return what one piece of PTX gives; with `effects` it keeps its place among the others."""
    return llvm.inline_asm(
        result,
        operands,
        text,
        f"{constraints},~{{memory}}" if effects else constraints,
        has_side_effects=effects,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        **at,
    )


def _struct(count: int, bits: int) -> Any:
    return ir.Type.parse(f"!llvm.struct<({', '.join([f'i{bits}'] * count)})>")


def _fields(value: Any, count: int, kind: Any, width: Any, **at: Any) -> tuple[Any, ...]:
    return tuple(kind(llvm.extractvalue(width, value, [i], **at)) for i in range(count))


# --- global memory, weak ---------------------------------------------------------------------


@dsl_user_op
def load_u32(address: Int64, *, loc: Any = None, ip: Any = None) -> Uint32:
    """Load 4 bytes. Order: weak."""
    at = {"loc": loc, "ip": ip}
    operands = [Int64(address).ir_value(**at)]
    return Uint32(asm(T.i32(), operands, "ld.global.u32 $0, [$1];", "=r,l", effects=True, **at))


@dsl_user_op
def load_u64(address: Int64, *, loc: Any = None, ip: Any = None) -> Int64:
    """Load 8 bytes. Order: weak."""
    at = {"loc": loc, "ip": ip}
    operands = [Int64(address).ir_value(**at)]
    return Int64(asm(T.i64(), operands, "ld.global.u64 $0, [$1];", "=l,l", effects=True, **at))


@dsl_user_op
def load_v4(address: Int64, *, loc: Any = None, ip: Any = None) -> tuple[Uint32, ...]:
    """Load 16 bytes from a 16-byte boundary as four words. Order: weak."""
    at = {"loc": loc, "ip": ip}
    text = "ld.global.v4.u32 {$0,$1,$2,$3}, [$4];"
    operands = [Int64(address).ir_value(**at)]
    value = asm(_struct(4, 32), operands, text, "=r,=r,=r,=r,l", effects=True, **at)
    return _fields(value, 4, Uint32, T.i32(), **at)


@dsl_user_op
def load_f32(address: Int64, enabled: Uint32, *, loc: Any = None, ip: Any = None) -> Float32:
    """Load an fp32 if `enabled` is not 0, else return 0. Order: weak."""
    at = {"loc": loc, "ip": ip}
    text = (
        "{\n.reg .pred p;\nsetp.ne.u32 p, $2, 0;\nmov.f32 $0, 0f00000000;\n"
        "@p ld.global.f32 $0, [$1];\n}"
    )
    operands = [Int64(address).ir_value(**at), Uint32(enabled).ir_value(**at)]
    return Float32(asm(T.f32(), operands, text, "=&f,l,r", effects=True, **at))


@dsl_user_op
def store_u32(address: Int64, value: Uint32, *, loc: Any = None, ip: Any = None) -> None:
    """Store 4 bytes. Order: weak."""
    at = {"loc": loc, "ip": ip}
    operands = [Int64(address).ir_value(**at), Uint32(value).ir_value(**at)]
    asm(None, operands, "st.global.u32 [$0], $1;", "l,r", effects=True, **at)


@dsl_user_op
def store_u64(address: Int64, value: Uint64, *, loc: Any = None, ip: Any = None) -> None:
    """Store 8 bytes. Order: weak."""
    at = {"loc": loc, "ip": ip}
    operands = [Int64(address).ir_value(**at), Uint64(value).ir_value(**at)]
    asm(None, operands, "st.global.u64 [$0], $1;", "l,l", effects=True, **at)


@dsl_user_op
def load_v2(
    address: Int64, enabled: Uint32, *, loc: Any = None, ip: Any = None
) -> tuple[Uint32, ...]:
    """Load two words from an 8-byte boundary if `enabled` is not 0, else return zeros. Weak."""
    at = {"loc": loc, "ip": ip}
    text = (
        "{\n.reg .pred p;\nsetp.ne.u32 p, $3, 0;\nmov.u32 $0, 0;\nmov.u32 $1, 0;\n"
        "@p ld.global.v2.u32 {$0,$1}, [$2];\n}"
    )
    operands = [Int64(address).ir_value(**at), Uint32(enabled).ir_value(**at)]
    value = asm(_struct(2, 32), operands, text, "=&r,=&r,l,r", effects=True, **at)
    return _fields(value, 2, Uint32, T.i32(), **at)


# --- packs: the unit a gather moves, 16, 4, 2 or 1 bytes, with a predicate instead of a branch ---

_PACK = {16: ("v4.u32", 4), 4: ("u32", 1), 2: ("u16", 1), 1: ("u8", 1)}


def _pack_load(nbytes: int, qualifier: str, address: Any, enabled: Any, **at: Any) -> Any:
    suffix, count = _PACK[nbytes]
    places = [f"${i}" for i in range(count)]
    target = "{" + ",".join(places) + "}" if count > 1 else places[0]
    zero = "".join(f"mov.u32 {place}, 0;\n" for place in places)
    text = (
        f"{{\n.reg .pred p;\nsetp.ne.u32 p, ${count + 1}, 0;\n{zero}"
        f"@p ld{qualifier}.global.{suffix} {target}, [${count}];\n}}"
    )
    outputs = ",".join(["=&r"] * count)
    operands = [Int64(address).ir_value(**at), Uint32(enabled).ir_value(**at)]
    kind = _struct(count, 32) if count > 1 else T.i32()
    value = asm(kind, operands, text, f"{outputs},l,r", effects=True, **at)
    return _fields(value, count, Uint32, T.i32(), **at) if count > 1 else (Uint32(value),)


@dsl_user_op
def load_pack(
    address: Int64, enabled: Uint32, nbytes: int, *, loc: Any = None, ip: Any = None
) -> tuple[Uint32, ...]:
    """Load a pack of `nbytes` bytes if `enabled` is not 0, else return zeros. Order: weak."""
    return _pack_load(nbytes, "", address, enabled, loc=loc, ip=ip)


@dsl_user_op
def load_peer_pack(
    address: Int64, enabled: Uint32, nbytes: int, *, loc: Any = None, ip: Any = None
) -> tuple[Uint32, ...]:
    """Load a pack that another rank wrote. Order: relaxed at system scope.

    Requires: a `poll` of the writer's flag, and a block barrier behind it, came before; or what is
    read is only a hint.
    """
    return _pack_load(nbytes, ".relaxed.sys", address, enabled, loc=loc, ip=ip)


@dsl_user_op
def store_pack(
    address: Int64,
    words: tuple[Uint32, ...],
    enabled: Uint32,
    nbytes: int,
    *,
    loc: Any = None,
    ip: Any = None,
) -> None:
    """Store a pack if `enabled` is not 0. Order: weak; a later `signal` publishes it."""
    at = {"loc": loc, "ip": ip}
    suffix, count = _PACK[nbytes]
    places = [f"${i + 2}" for i in range(count)]
    source = "{" + ",".join(places) + "}" if count > 1 else places[0]
    text = f"{{\n.reg .pred p;\nsetp.ne.u32 p, $1, 0;\n@p st.global.{suffix} [$0], {source};\n}}"
    operands = [Int64(address).ir_value(**at), Uint32(enabled).ir_value(**at)]
    operands += [Uint32(word).ir_value(**at) for word in words]
    asm(None, operands, text, ",".join(["l", "r"] + ["r"] * count), effects=True, **at)


@dsl_user_op
def load_peer_u64(address: Int64, *, loc: Any = None, ip: Any = None) -> Uint64:
    """Load 8 bytes that another rank wrote. Order and Requires: as `load_peer_pack`."""
    at = {"loc": loc, "ip": ip}
    operands = [Int64(address).ir_value(**at)]
    text = "ld.relaxed.sys.global.u64 $0, [$1];"
    return Uint64(asm(T.i64(), operands, text, "=l,l", effects=True, **at))


# --- tagged units: 8 data bytes and the epoch twice, 16 bytes that arrive as two 8-byte halves ---


@dsl_user_op
def store_unit(
    address: Int64,
    data: tuple[Uint32, Uint32],
    tag: Uint32,
    enabled: Uint32,
    *,
    loc: Any = None,
    ip: Any = None,
) -> None:
    """Store {data[0], tag, data[1], tag} if `enabled` is not 0. Order: relaxed at system scope.

    Each half is one 64-bit element, so a reader that sees the tag sees the data beside it. Nothing
    is promised about the two halves together.
    """
    at = {"loc": loc, "ip": ip}
    text = (
        "{\n.reg .pred p;\n.reg .b64 a;\n.reg .b64 b;\nsetp.ne.u32 p, $4, 0;\n"
        "mov.b64 a, {$1, $3};\nmov.b64 b, {$2, $3};\n"
        "@p st.relaxed.sys.global.v2.b64 [$0], {a, b};\n}"
    )
    operands = [Int64(address).ir_value(**at)]
    operands += [Uint32(word).ir_value(**at) for word in (*data, tag, enabled)]
    asm(None, operands, text, "l,r,r,r,r", effects=True, **at)


@dsl_user_op
def load_unit(address: Int64, *, loc: Any = None, ip: Any = None) -> tuple[Uint32, ...]:
    """Return data 0, tag 0, data 1, tag 1 of a unit.

    Order: relaxed at system scope; a half whose tag is the awaited epoch is complete.
    """
    at = {"loc": loc, "ip": ip}
    text = (
        "{\n.reg .b64 a;\n.reg .b64 b;\nld.relaxed.sys.global.v2.b64 {a, b}, [$4];\n"
        "mov.b64 {$0, $1}, a;\nmov.b64 {$2, $3}, b;\n}"
    )
    operands = [Int64(address).ir_value(**at)]
    value = asm(_struct(4, 32), operands, text, "=r,=r,=r,=r,l", effects=True, **at)
    return _fields(value, 4, Uint32, T.i32(), **at)


@dsl_user_op
def announce(address: Int64, value: Uint64, *, loc: Any = None, ip: Any = None) -> None:
    """Raise a flag that publishes nothing but itself. Order: relaxed at system scope."""
    at = {"loc": loc, "ip": ip}
    operands = [Int64(address).ir_value(**at), Uint64(value).ir_value(**at)]
    asm(None, operands, "st.relaxed.sys.global.u64 [$0], $1;", "l,l", effects=True, **at)


@dsl_user_op
def store_v2(
    address: Int64, words: tuple, enabled: Uint32, *, loc: Any = None, ip: Any = None
) -> None:
    """Store two words to an 8-byte boundary if `enabled` is not 0. Order: weak."""
    at = {"loc": loc, "ip": ip}
    text = "{\n.reg .pred p;\nsetp.ne.u32 p, $3, 0;\n@p st.global.v2.u32 [$0], {$1,$2};\n}"
    operands = [Int64(address).ir_value(**at)]
    operands += [Uint32(word).ir_value(**at) for word in (*words, enabled)]
    asm(None, operands, text, "l,r,r,r", effects=True, **at)


# --- programmatic dependent launch -------------------------------------------------------------

_target = "sm_80"


def set_target(arch: str) -> None:
    """Say for which architecture the next kernel is traced."""
    global _target
    _target = arch


def follow_predecessor() -> None:
    """Wait until the launch before this one is complete and visible, then let the next one start.

    Does nothing in a launch without the attribute, and is not there before sm_90. The order of the
    two matters: a launch that let its successor start before it waited could fill the device with
    generations that wait for one another.
    """
    if int(_target.split("_")[1].rstrip("af")) >= 90:
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()


# --- flags and control ----------------------------------------------------------------------------


@dsl_user_op
def signal(address: Int64, value: Uint64, *, loc: Any = None, ip: Any = None) -> None:
    """Raise a flag. Order: release at system scope.

    Everything this thread stored, or saw through a barrier of its block, is visible to whoever
    polls this value.
    """
    at = {"loc": loc, "ip": ip}
    operands = [Int64(address).ir_value(**at), Uint64(value).ir_value(**at)]
    asm(None, operands, "st.release.sys.global.u64 [$0], $1;", "l,l", effects=True, **at)


@dsl_user_op
def poll(address: Int64, *, loc: Any = None, ip: Any = None) -> Uint64:
    """Read a flag. Order: acquire at system scope: what came before the `signal` is visible."""
    at = {"loc": loc, "ip": ip}
    operands = [Int64(address).ir_value(**at)]
    text = "ld.acquire.sys.global.u64 $0, [$1];"
    return Uint64(asm(T.i64(), operands, text, "=l,l", effects=True, **at))


@dsl_user_op
def load_host_u32(address: Int64, *, loc: Any = None, ip: Any = None) -> Uint32:
    """Read a word that the host may change at any time. Order: relaxed at system scope."""
    at = {"loc": loc, "ip": ip}
    operands = [Int64(address).ir_value(**at)]
    text = "ld.relaxed.sys.global.u32 $0, [$1];"
    return Uint32(asm(T.i32(), operands, text, "=r,l", effects=True, **at))


@dsl_user_op
def store_host_u32(address: Int64, value: Uint32, *, loc: Any = None, ip: Any = None) -> None:
    """Write the word the host watches. Order: release at system scope."""
    at = {"loc": loc, "ip": ip}
    operands = [Int64(address).ir_value(**at), Uint32(value).ir_value(**at)]
    asm(None, operands, "st.release.sys.global.u32 [$0], $1;", "l,r", effects=True, **at)


@dsl_user_op
def claim(address: Int64, value: Uint32, *, loc: Any = None, ip: Any = None) -> Uint32:
    """Set a word of this rank's control block from 0 to `value`; return what it held.

    Order: relaxed at device scope. Requires: local memory.
    """
    at = {"loc": loc, "ip": ip}
    operands = [Int64(address).ir_value(**at), Uint32(value).ir_value(**at)]
    text = "atom.relaxed.gpu.global.cas.b32 $0, [$1], 0, $2;"
    return Uint32(asm(T.i32(), operands, text, "=r,l,r", effects=True, **at))


@dsl_user_op
def replace_u32(
    address: Int64, value: Uint32, enabled: Uint32, *, loc: Any = None, ip: Any = None
) -> Uint32:
    """Set a word of this rank's control block, if `enabled` is not 0; return what it held, or 0.

    Order: relaxed at device scope. Requires: local memory.
    """
    at = {"loc": loc, "ip": ip}
    text = (
        "{\n.reg .pred p;\nsetp.ne.u32 p, $3, 0;\nmov.u32 $0, 0;\n"
        "@p atom.relaxed.gpu.global.exch.b32 $0, [$1], $2;\n}"
    )
    operands = [Int64(address).ir_value(**at)]
    operands += [Uint32(word).ir_value(**at) for word in (value, enabled)]
    return Uint32(asm(T.i32(), operands, text, "=&r,l,r,r", effects=True, **at))


@dsl_user_op
def reduce_u64(how: str, address: Int64, value: Uint64, *, loc: Any = None, ip: Any = None) -> None:
    """Raise a word of this rank's control block by `value` ("add"), or to it ("max").

    Order: relaxed at device scope; without an answer. Requires: local memory.
    """
    at = {"loc": loc, "ip": ip}
    operands = [Int64(address).ir_value(**at), Uint64(value).ir_value(**at)]
    asm(None, operands, f"red.relaxed.gpu.global.{how}.u64 [$0], $1;", "l,l", effects=True, **at)


@dsl_user_op
def global_timer(*, loc: Any = None, ip: Any = None) -> Int64:
    """Return the device's wall clock in nanoseconds."""
    at = {"loc": loc, "ip": ip}
    return Int64(asm(T.i64(), [], "mov.u64 $0, %globaltimer;", "=l", effects=True, **at))


@dsl_user_op
def block_all(condition: Uint32, *, loc: Any = None, ip: Any = None) -> Uint32:
    """Barrier of the block; return 1 if `condition` was not 0 in every thread, else 0.

    Participants: every thread of the block. Order: as a block barrier.
    """
    at = {"loc": loc, "ip": ip}
    text = (
        "{\n.reg .pred p;\n.reg .pred q;\nsetp.ne.u32 p, $1, 0;\n"
        "barrier.cta.red.and.aligned.pred q, 0, p;\nselp.u32 $0, 1, 0, q;\n}"
    )
    operands = [Uint32(condition).ir_value(**at)]
    return Uint32(asm(T.i32(), operands, text, "=r,r", effects=True, **at))


def warp_all(condition: Any) -> Uint32:
    """Return 1 if `condition` holds in every lane, else 0. Participants: a warp.

    Makes a value uniform that lanes read one by one while another block may be changing it.
    """
    return Uint32(cute.arch.vote_all_sync(condition))


# --- shared memory --------------------------------------------------------------------------------


@dsl_user_op
def load_shared_u32(address: Int32, *, loc: Any = None, ip: Any = None) -> Uint32:
    """Load 4 bytes of shared memory."""
    at = {"loc": loc, "ip": ip}
    operands = [Int32(address).ir_value(**at)]
    return Uint32(asm(T.i32(), operands, "ld.shared.u32 $0, [$1];", "=r,r", effects=True, **at))


@dsl_user_op
def load_shared_u64(address: Int32, *, loc: Any = None, ip: Any = None) -> Uint64:
    """Load 8 bytes of shared memory."""
    at = {"loc": loc, "ip": ip}
    operands = [Int32(address).ir_value(**at)]
    return Uint64(asm(T.i64(), operands, "ld.shared.u64 $0, [$1];", "=l,r", effects=True, **at))


@dsl_user_op
def load_shared_v2_u64(address: Int32, *, loc: Any = None, ip: Any = None) -> tuple[Uint64, ...]:
    """Load 16 bytes of shared memory as two 8-byte words."""
    at = {"loc": loc, "ip": ip}
    operands = [Int32(address).ir_value(**at)]
    text = "ld.shared.v2.u64 {$0,$1}, [$2];"
    value = asm(_struct(2, 64), operands, text, "=l,=l,r", effects=True, **at)
    return _fields(value, 2, Uint64, T.i64(), **at)


@dsl_user_op
def load_shared_v4(address: Int32, *, loc: Any = None, ip: Any = None) -> tuple[Uint32, ...]:
    """Load 16 bytes of shared memory as four words."""
    at = {"loc": loc, "ip": ip}
    operands = [Int32(address).ir_value(**at)]
    text = "ld.shared.v4.u32 {$0,$1,$2,$3}, [$4];"
    value = asm(_struct(4, 32), operands, text, "=r,=r,=r,=r,r", effects=True, **at)
    return _fields(value, 4, Uint32, T.i32(), **at)


@dsl_user_op
def store_shared_u32(address: Int32, value: Uint32, *, loc: Any = None, ip: Any = None) -> None:
    """Store 4 bytes to shared memory."""
    at = {"loc": loc, "ip": ip}
    operands = [Int32(address).ir_value(**at), Uint32(value).ir_value(**at)]
    asm(None, operands, "st.shared.u32 [$0], $1;", "r,r", effects=True, **at)


@dsl_user_op
def store_shared_u64(address: Int32, value: Uint64, *, loc: Any = None, ip: Any = None) -> None:
    """Store 8 bytes to shared memory."""
    at = {"loc": loc, "ip": ip}
    operands = [Int32(address).ir_value(**at), Uint64(value).ir_value(**at)]
    asm(None, operands, "st.shared.u64 [$0], $1;", "r,l", effects=True, **at)


@dsl_user_op
def shared_address(pointer: Any, *, loc: Any = None, ip: Any = None) -> Int32:
    """Return the 32-bit address of a shared allocation."""
    return Int32(pointer.toint(loc=loc, ip=ip))
