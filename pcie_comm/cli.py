"""The command line: `pcie-comm`, and `python -m pcie_comm`.

Only what parses options is imported here; commands import what they need, so that --help is quick.
Exit codes: 0 right, 1 a difference was found, 2 an error, which is one line on stderr.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from .console import console
from .console import progress as show_progress
from .exits import FOUND_DIFFERENCE, errors_as_one_line
from .topology.commands import Levels, mount

if TYPE_CHECKING:
    from .build import Built
    from .demo import RankReport
    from .topology.model import Host

SHOWN_FAULTS = 10

app = typer.Typer(
    help="Small, latency-bound collectives between the GPUs of one host without NVLink.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def main() -> int:
    """Run the program with this process's arguments. Ends in SystemExit."""
    app(prog_name="pcie-comm")
    return 0


def _show_version(wanted: bool) -> None:
    if wanted:
        from . import __version__

        typer.echo(f"pcie-comm {__version__}")
        raise typer.Exit


@app.callback()
def _program(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    pass


@app.command()
def demo(
    ranks: Annotated[int, typer.Option(help="World size, 1 to 16.")] = 4,
    device: Annotated[
        str | None,
        typer.Option(
            help="cpu, cuda (the GPUs in turn) or cuda:K.", show_default="a GPU, else cpu"
        ),
    ] = None,
    transport: Annotated[str, typer.Option(help="auto, or the name of a transport.")] = "auto",
    rows: Annotated[int, typer.Option(min=0, help="Rows of every call.")] = 8,
    processes: Annotated[
        bool, typer.Option("--processes", help="One process per rank instead of one thread.")
    ] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Timed rounds, each with fresh rows.")] = 20,
    deadline: Annotated[
        float, typer.Option(min=1.0, help="Seconds after which --processes are ended.")
    ] = 300.0,
) -> None:
    """Let the ranks of this machine call the main operation, and check every result."""
    with errors_as_one_line():
        from .demo import DemoOptions, run

        options = DemoOptions(ranks, device, transport, rows, rounds, processes, deadline)
        outcome = run(options)
    screen = console()
    if outcome.remark:
        screen.print(outcome.remark)
    screen.print(_rank_table(outcome.reports))
    for report in outcome.reports:
        for fault in report.faults[:SHOWN_FAULTS]:
            screen.print(f"rank {report.rank}: {fault}")
    screen.print(outcome.summary)
    raise typer.Exit(0 if outcome.right else FOUND_DIFFERENCE)


def _rank_table(reports: Sequence[RankReport]) -> Table:
    table = Table()
    for name in ("rank", "device", "transport", "protocol"):
        table.add_column(name)
    table.add_column("us per call", justify="right")
    table.add_column("verdict")
    for report in reports:
        verdict = f"{len(report.faults)} DIFFERENCES" if report.faults else "right"
        cells = (report.device, report.transport, report.protocol, f"{report.call_us:.1f}")
        table.add_row(str(report.rank), *cells, verdict)
    return table


@app.command("compile")
def compile_kernels(
    out: Annotated[Path, typer.Option(help="Folder to write to; PCIE_COMM_KERNELS reads it.")],
    arch: Annotated[
        list[str] | None,
        typer.Option(help="For example sm_90a, or native for this GPU. Repeatable."),
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="Every architecture that the wheel has kernels for.")
    ] = False,
    op: Annotated[
        list[str] | None,
        typer.Option(help="A collective. Repeatable.", show_default="all that are registered"),
    ] = None,
    floors: Annotated[
        bool, typer.Option("--floors", help="Also the kernels that only `pcie-comm bench` runs.")
    ] = False,
    probes: Annotated[
        bool, typer.Option("--probes", help="Also those that only `pcie-comm topo` runs.")
    ] = False,
    router: Annotated[
        list[str] | None,
        typer.Option(help="Also the router of a model, or of all that are known. Repeatable."),
    ] = None,
    tensors: Annotated[
        int, typer.Option(min=1, max=8, help="Also gathers of up to so many tensors in a launch.")
    ] = 1,
    stats: Annotated[
        bool, typer.Option("--stats", help="Also those that count, for Config.stats.")
    ] = False,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Worker processes.", show_default="cores, at most 4")
    ] = None,
) -> None:
    """Compile every kernel ahead of time, for GPUs that this machine need not have."""
    with errors_as_one_line():
        from . import build

        started = time.perf_counter()
        names = [*(build.WHEEL_ARCHS if every else ()), *(arch or ())]
        todo = build.jobs(
            build.resolve_archs(names),
            op or (),
            floors=floors,
            probes=probes,
            routers=build.resolve_routers(router or ()),
            tensors=tensors,
            stats=stats,
        )
        with progress(len(todo)) as advance:
            done = build.build_all(todo, out, jobs or build.default_workers(), advance)
    _show_kernels(done, time.perf_counter() - started, out)


def _show_kernels(done: Sequence[Built], elapsed_s: float, out: Path) -> None:
    screen = console()
    screen.print(_kernel_table(done))
    total = sum(built.nbytes for built in done)
    screen.print(
        f"{len(done)} kernels, {total} bytes in {elapsed_s:.1f} s; "
        f"to use them, set PCIE_COMM_KERNELS={out}"
    )


@contextlib.contextmanager
def progress(total: int) -> Iterator[Callable[[Built], None]]:
    """Show the progress of a build: a bar on a terminal, else a line per kernel."""
    with show_progress(total, "compiling") as advance:
        yield lambda built: advance(
            f"{built.job.key} {built.job.arch}",
            f"{built.nbytes} bytes, {built.sass_nbytes} of SASS, {built.elapsed_s:.2f} s",
        )


def _kernel_table(done: Sequence[Built]) -> Table:
    table = Table("collective", "arch")
    for name in ("kernels", "SASS", "registers", "seconds"):
        table.add_column(name, justify="right")
    groups: dict[tuple[str, str], list[Built]] = {}
    for built in done:
        groups.setdefault((built.job.key.op, built.job.arch), []).append(built)
    for (op, arch), members in sorted(groups.items()):
        registers = sorted(built.registers for built in members)
        spread = (
            f"{registers[0]} to {registers[-1]}" if registers[0] < registers[-1] else registers[0]
        )
        seconds = f"{sum(built.elapsed_s for built in members):.1f}"
        nbytes = sum(built.sass_nbytes for built in members)
        table.add_row(op, arch, str(len(members)), str(nbytes), str(spread), seconds)
    return table


@app.command(
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def bench(context: typer.Context) -> None:
    """Measure the collectives on this machine; `pcie-comm bench --help` lists the options."""
    from .bench.program import main as run  # which also runs without typer, hence its own options

    raise typer.Exit(run(context.args))


def _probe(host: Host, levels: Levels) -> Host:
    from .console import timed_progress
    from .probe import Options, probe

    options = Options(levels.verify, levels.measure, levels.quick)
    return probe(host, options, lambda seconds: timed_progress(seconds, "probing"))


mount(app, _probe)
