"""How programs of this package end: exit codes, and errors as one line."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import typer

FOUND_DIFFERENCE = 1
FAILED = 2


@contextlib.contextmanager
def errors_as_one_line() -> Iterator[None]:
    """Turn an error of the library into a line and exit code 2; anything else is a bug of ours."""
    from .errors import CommError

    try:
        yield
    except CommError as error:
        text = " ".join(str(error).split())
        typer.echo(f"pcie-comm: {type(error).__name__}: {text}", err=True)
        raise typer.Exit(FAILED) from None
