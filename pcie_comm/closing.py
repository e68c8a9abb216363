"""How a group's memory goes back: together with the peers, alone after a failure, or later.

A slab may be freed once no peer can address it. Together, the ranks agree that all have unmapped.
Alone, a rank reads on the roll call who has; a peer whose process has ended has, too. Where the
peers' own mappings keep the memory (POSIX shared memory), nobody needs to be asked.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass

from .agreement import agree
from .bootstrap import Bootstrap
from .channel import Channel
from .errors import CommError
from .transport.base import Transport
from .watch.watch import Watch

CLOSE_TIMEOUT_S = 5.0
"""Longest wait for peers to unmap, once the group has failed."""

_PAUSE_S = 0.005


@dataclass(eq=False)
class Estate:
    """What a group leaves behind.

    Attributes:
        abandoned: Its rank has closed it, and waits for the peers only.
    """

    channels: dict[str, Channel]
    transports: dict[str, Transport]
    watch: Watch
    abandoned: bool = False

    def failure(self) -> CommError | None:
        """Return what broke the group, or None."""
        found = (channel.engine.failure() for channel in self.channels.values())
        return next((failure for failure in found if failure is not None), self.watch.error())

    def captured(self) -> bool:
        """Tell whether a graph of this rank may address the memory."""
        return any(getattr(c.engine, "captured", False) for c in self.channels.values())

    def let_go(self) -> None:
        """Finish the own work, and stop addressing the peers. May be called again."""
        for channel in self.channels.values():
            channel.engine.synchronize()
            channel.engine.close()
        for transport in self.transports.values():
            transport.unmap()

    def free(self) -> None:
        """Free the own slabs. Requires: no peer can address them."""
        for transport in self.transports.values():
            transport.free()


_kept: list[Estate] = []
"""What somebody may still address: graphs, or ranks that did not come to close."""


def keep(estate: Estate) -> None:
    """Keep an estate until the process ends, or until `reclaim` finds it free."""
    _kept.append(estate)


def close(estate: Estate, bootstrap: Bootstrap, timeout_s: float) -> None:
    """Close together, or alone if the group has failed or fails meanwhile.

    Raises:
        CommError: A rank that lives did not come, or a driver failed.
    """
    failure = estate.failure() or bootstrap.failure
    if failure is not None:
        estate.watch.give_up(failure)
        close_alone(estate)
        return
    try:
        close_together(estate, bootstrap, timeout_s)
    except CommError as error:
        # A death or an abort that comes now is no worse than one that came a moment ago.
        cut_off = bootstrap.failed and estate.watch.cause is not None
        estate.watch.give_up(error)
        with suppress(CommError):  # the first error is the one that counts
            close_alone(estate)
        if not cut_off:
            raise
    except BaseException as error:  # Ctrl-C
        estate.watch.abort(f"close() was interrupted by {type(error).__name__}")
        with suppress(CommError):
            close_alone(estate, 0.0)
        raise


def close_together(estate: Estate, bootstrap: Bootstrap, timeout_s: float) -> None:
    """Free everything once no rank can address it; keep all if any rank captured a graph.

    Collective.

    Raises:
        CommError: A rank did not come or could not unmap; `close_alone` is what remains.
    """
    captured = b"%d" % estate.captured()
    flags = agree(bootstrap, "close", lambda: captured, timeout_s)
    if b"1" in flags:
        keep(estate)
        estate.watch.leave()
        return

    def let_go() -> bytes:
        estate.let_go()
        estate.watch.say_released()
        return b""

    agree(bootstrap, "unmapping", let_go, timeout_s)
    estate.watch.leave()
    estate.free()


def close_alone(estate: Estate, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
    """Free what no living peer can address; keep the rest, for `reclaim` to look at later.

    Requires: the peers were told that this rank comes to no further call.

    Raises:
        CommError: The driver gives the memory back to nobody; it is kept.
    """
    keep(estate)
    if estate.captured():
        estate.watch.leave()
        return
    estate.abandoned = True
    deadline = time.monotonic() + timeout_s
    try:
        while not _try_to_free(estate) and time.monotonic() < deadline:
            time.sleep(_PAUSE_S)
    finally:
        estate.watch.retire()


def _try_to_free(estate: Estate) -> bool:
    """Free an estate if no peer can address it; tell whether that is done."""
    if not estate.watch.released:
        estate.let_go()
        estate.watch.say_released()
    shared = all(transport.mappings_keep_memory for transport in estate.transports.values())
    if not (shared or estate.watch.all_let_go()):
        return False
    estate.free()
    estate.watch.leave()
    _kept.remove(estate)
    return True


def reclaim() -> None:
    """Free what was kept for peers that have let go of it, or ended, since."""
    for estate in list(_kept):
        if estate.abandoned:
            with suppress(CommError):  # kept; whoever closed the group was told
                _try_to_free(estate)
