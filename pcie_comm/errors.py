"""The error tree. Every failure the library reports is one of these classes.

An error means one thing, carries its facts as attributes and says in its message what failed, the
facts as name=value and what to do. docs/errors.md lists what is guaranteed after each of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class CommError(Exception):
    """Base class of every error of this library.

    Args:
        message: What failed, the facts, and what to do.
        rank: Group rank that reports the error.
        peer: Group rank the error is about.
        op: Name of the collective.
        epoch: Channel epoch of the launch that failed.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        peer: int | None = None,
        op: str | None = None,
        epoch: int | None = None,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.peer = peer
        self.op = op
        self.epoch = epoch

    def __reduce__(self) -> Any:
        return _rebuild, (type(self), self.args, self.__dict__)

    def __str__(self) -> str:
        facts = [
            f"{name}={value}"
            for name in ("rank", "peer", "op", "epoch")
            if (value := getattr(self, name)) is not None
        ]
        message = super().__str__()
        return f"{message} [{', '.join(facts)}]" if facts else message


def _rebuild(kind: type[CommError], args: tuple[Any, ...], facts: dict[str, Any]) -> CommError:
    """Return an error as it was: its constructor needs keywords that pickle does not keep."""
    error = kind.__new__(kind, *args)
    error.args = args  # TimeoutError is an OSError, which leaves them to its constructor
    error.__dict__.update(facts)
    return error


class InvalidArgumentError(CommError, ValueError):
    """An argument is wrong. This call enqueued nothing on this rank."""


class UnsupportedError(CommError):
    """The request is legal, but this machine or this version cannot serve it.

    Attributes:
        reason: The missing thing, in a few words.
    """

    def __init__(self, message: str, *, reason: str, **facts: Any) -> None:
        super().__init__(message, **facts)
        self.reason = reason


class ClosedError(CommError):
    """The group or channel was closed before this call."""


class BusyError(CommError):
    """The channel is in use by another thread, stream or graph."""


class BrokenError(CommError):
    """An earlier failure poisoned the channel; that first failure is `__cause__`."""


class MismatchError(CommError):
    """Ranks disagree. Nobody read another operation's bytes.

    Attributes:
        values: Group rank -> what that rank asked for or brought along.
    """

    def __init__(self, message: str, *, values: Mapping[int, object], **facts: Any) -> None:
        super().__init__(message, **facts)
        self.values = dict(values)


class PeerError(CommError):
    """Another rank is the cause."""


class PeerTimeoutError(PeerError, TimeoutError):
    """A peer did not arrive in time.

    Attributes:
        wanted: Epoch that was awaited.
        seen: Epoch that the peer had published.
        elapsed_ns: Wall time spent waiting.
    """

    def __init__(
        self,
        message: str,
        *,
        wanted: int | None = None,
        seen: int | None = None,
        elapsed_ns: int | None = None,
        **facts: Any,
    ) -> None:
        super().__init__(message, **facts)
        self.wanted = wanted
        self.seen = seen
        self.elapsed_ns = elapsed_ns


class PeerAbortedError(PeerError):
    """A rank failed or called `abort()`; `peer` is that rank, the message holds its reason."""


class PeerDiedError(PeerError):
    """A peer's process ended before the group was closed, or a connection to the peers broke.

    Attributes:
        exit_code: Exit code of the process, or minus the signal that ended it; None if that cannot
            be told, or not yet.
    """

    def __init__(self, message: str, *, exit_code: int | None = None, **facts: Any) -> None:
        super().__init__(message, **facts)
        self.exit_code = exit_code


class CudaError(CommError):
    """A CUDA driver call failed.

    Attributes:
        name: CUDA's name of the error, for example `CUDA_ERROR_OUT_OF_MEMORY`.
        call: The driver function that returned it.
    """

    def __init__(self, message: str, *, name: str, call: str, **facts: Any) -> None:
        super().__init__(message, **facts)
        self.name = name
        self.call = call


class CompileError(CommError):
    """A kernel is missing, stale or could not be compiled."""


class CommWarning(UserWarning):
    """Something works, but not as asked or not as fast as it could."""
