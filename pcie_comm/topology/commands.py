"""The commands `pcie-comm topo`, `topo diff`, `doctor` and `advise`.

Only what parses options is imported here. Exit codes as in cli.py: 0 right, 1 something was found,
2 an error, which is one line on stderr.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..exits import FOUND_DIFFERENCE, errors_as_one_line

if TYPE_CHECKING:
    from .advice import Advice
    from .doctor import Finding, Unjudged
    from .model import Host

From = Annotated[
    Path | None,
    typer.Option(
        "--from",
        help="A report, what another tool printed, a folder of such, or a copy of sysfs.",
        show_default="this host",
    ),
]
Redact = Annotated[
    bool, typer.Option("--redact", help="Leave out UUIDs, serial numbers, host and file names.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

topo_app = typer.Typer(
    help="Show what this host, or one in files, really is.", invoke_without_command=True
)


@dataclass(frozen=True)
class Levels:
    """What else to find out about this host. Any of them asks CUDA about pairs.

    Attributes:
        capability: Only that.
        verify: Try every way that bytes take, and look at the owner's side.
        measure: Time them.
        quick: Shorter.
    """

    capability: bool = False
    verify: bool = False
    measure: bool = False
    quick: bool = False

    @property
    def any(self) -> bool:
        return self.capability or self.verify or self.measure


Probe = Callable[["Host", Levels], "Host"]
"""Takes a host through levels that need CUDA, which this package knows nothing of."""

_probe: list[Probe] = []


def mount(app: typer.Typer, probe: Probe) -> None:
    """Add the commands to a program.

    Args:
        app: The program.
        probe: For options that need CUDA.
    """
    _probe[:] = [probe]
    app.add_typer(topo_app, name="topo")
    app.command()(doctor)
    app.command()(advise)


def _load(path: Path | None, levels: Levels | None = None) -> Host:
    from ..errors import InvalidArgumentError
    from .collect import collect, from_path

    if levels is None or not (levels.any or levels.quick):
        return collect() if path is None else from_path(path)
    if path is not None:
        raise InvalidArgumentError(
            f"--from={path} names files; leave it out to verify or measure this host"
        )
    if not levels.any:
        raise InvalidArgumentError("--quick needs --verify or --measure")
    return _probe[0](collect(), levels)


def _write(path: Path, text: str) -> None:
    from ..errors import InvalidArgumentError

    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidArgumentError(f"file={path} cannot be written: {error.strerror}") from error
    typer.echo(f"wrote {path}", err=True)


@topo_app.callback()
def topo(
    context: typer.Context,
    source: From = None,
    as_json: AsJson = False,
    html: Annotated[Path | None, typer.Option(help="Write a page that needs no network.")] = None,
    mermaid: Annotated[bool, typer.Option("--mermaid", help="Print a Mermaid chart.")] = False,
    nccl_xml: Annotated[
        Path | None, typer.Option(help="Write NCCL's topology XML (NCCL_TOPO_FILE).")
    ] = None,
    redact: Redact = False,
    capability: Annotated[
        bool, typer.Option("--capability", help="Ask CUDA about pairs of GPUs, too.")
    ] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Try every way that bytes take, on the GPUs.")
    ] = False,
    measure: Annotated[
        bool, typer.Option("--measure", help="Time them: bandwidths, latencies, patterns.")
    ] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="With --verify, --measure: under 30 s on one GPU.")
    ] = False,
) -> None:
    """Show what this host, or one in files, really is."""
    if context.invoked_subcommand is not None:
        return
    with errors_as_one_line():
        from . import codec, nccl_export, render
        from .redact import redact as redacted

        host = _load(source, Levels(capability, verify, measure, quick))
        if redact:
            host = redacted(host)
        if html is not None:
            _write(html, render.to_html(host))
        if nccl_xml is not None:
            _write(nccl_xml, nccl_export.to_nccl_xml(host))
        if as_json:
            typer.echo(codec.to_json(host), nl=False)
        elif mermaid:
            typer.echo(render.to_mermaid(host), nl=False)
        elif html is None and nccl_xml is None:
            _show(render.to_text(host))


def _show(text: str) -> None:
    """Print a text; on a terminal with labels in colours, otherwise as it is."""
    from rich.text import Text

    from ..console import console

    screen = console()
    styled = Text(text)
    styled.highlight_regex(r"\b(?:PIX|PXB|OK)\b", "green")
    styled.highlight_regex(r"\b(?:PHB|NODE)\b", "yellow")
    styled.highlight_regex(r"\bSYS\b|\w+!\w+", "red")
    styled.highlight_regex(r"\b(?:NO-ACCESS|DROPPED|MIRRORED|CORRUPT|HANG)\b", "bold red")
    screen.print(styled)


@topo_app.command("diff")
def diff(
    before: Annotated[Path, typer.Argument(help="A report, or anything that --from takes.")],
    after: Annotated[Path, typer.Argument(help="Likewise.")],
) -> None:
    """Say what differs between two reports; exit code 1 if something does."""
    with errors_as_one_line():
        from .compare import differences

        lines = differences(_load(before), _load(after))
    for line in lines:
        typer.echo(line)
    if not lines:
        typer.echo("no difference")
    raise typer.Exit(FOUND_DIFFERENCE if lines else 0)


def doctor(
    source: From = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit code 1 for warnings too, not only for errors.")
    ] = False,
    as_json: AsJson = False,
    advice: Annotated[
        Path | None, typer.Option(help="An advice file, to see whether it still fits.")
    ] = None,
    redact: Redact = False,
) -> None:
    """Judge this host and this installation, or another host; exit code 1 if there are errors."""
    with errors_as_one_line():
        from ..installation import add_to
        from .advice import read_advice
        from .doctor import Case, examine, exit_code
        from .redact import redact as redacted

        given = None if advice is None else read_advice(advice)
        host = _load(source)
        judged = examine(Case(redacted(host) if redact else host, given))
        findings, unjudged = add_to(judged, host) if source is None else judged
    if as_json:
        _show_json(findings, unjudged)
    else:
        _show_findings(findings, unjudged)
    raise typer.Exit(exit_code(findings, strict))


def _show_json(findings: list[Finding], unjudged: list[Unjudged]) -> None:
    import json

    data = {
        "format": "pcie_comm doctor 1",
        "findings": [finding.__dict__ for finding in findings],
        "unjudged": [item.__dict__ for item in unjudged],
    }
    typer.echo(json.dumps(data, indent=1, ensure_ascii=False))


def _show_findings(findings: list[Finding], unjudged: list[Unjudged]) -> None:
    for item in findings:
        typer.echo(f"{item.severity}: {item.id}: {item.subject}")
        typer.echo(f"  evidence  {item.evidence}")
        typer.echo(f"  expected  {item.expected}; seen: {item.seen}")
        typer.echo(f"  remedy    {item.remedy}")
        typer.echo(f"  source    {item.source}")
    reasons: dict[str, list[str]] = {}
    for gap in unjudged:
        reasons.setdefault(gap.reason, []).append(gap.id)
    for reason, names in reasons.items():
        typer.echo(f"not judged: {', '.join(names)}: {reason}")
    kinds = [finding.severity for finding in findings]
    counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in ("error", "warning", "info"))
    typer.echo(f"{counts}; {len(unjudged)} rules could not judge")


def advise(
    source: From = None,
    gpus: Annotated[
        int | None, typer.Option(help="How many GPUs the group has.", show_default="all")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write the file that Config.advice takes.")
    ] = None,
) -> None:
    """Say which GPUs to take, in which order, and which pairs to leave alone."""
    with errors_as_one_line():
        from .advice import advise as advice_for

        host = _load(source)
        advice = advice_for(host, gpus)
        if out is not None:
            _write(out, advice.to_json())
    _show_advice(advice)


def _show_advice(advice: Advice) -> None:
    typer.echo(f"islands: {' | '.join(' '.join(group) for group in advice.islands)}")
    if advice.traffic_islands is not None:
        typer.echo(
            f"islands by traffic: {' | '.join(' '.join(some) for some in advice.traffic_islands)}"
        )
    typer.echo(f"order: {' '.join(advice.order)}")
    if advice.visible_devices is None:
        typer.echo("CUDA_VISIBLE_DEVICES: not given, the UUID of a GPU is unknown")
    else:
        typer.echo(f"CUDA_VISIBLE_DEVICES={advice.visible_devices}")
    for memory, limits in (advice.crossovers or {}).items():
        typer.echo(f"protocol in {memory}: {_protocols(limits)}")
    for veto in advice.vetoes:
        typer.echo(f"veto: {veto.source} -> {veto.target}: {veto.reason}")
    typer.echo(f"{len(advice.vetoes)} vetoes")


def _protocols(limits: Mapping[str, int | None]) -> str:
    """Return crossovers in words."""
    tagged, push = limits["tagged_nbytes"], limits["push_nbytes"]
    rest = "push" if push is None else f"push up to {push}, then pull"
    return f"tagged up to {tagged} bytes that a rank receives, then {rest}"
