"""Where plugins are found: by name, among those that come along, are registered or are installed.

The built-in collectives are plugins like any other. What a plugin is: collective.py.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import threading
import warnings
from collections.abc import Callable

from ..errors import CommWarning, InvalidArgumentError, UnsupportedError
from .collective import Collective, check_collective

ENTRY_POINT_GROUP = "pcie_comm.collectives"

BUILT_IN_MODULES = (
    "all_gather_pair",
    "all_gather_heads",
    "router",
    "all_gather_pair_topk",
    "all_gathers",
    "all_reduce",
    "all_reduce_norm",
    "lse_reduce_scatter",
    "vocab_argmax",
)
"""Modules of this package whose COLLECTIVES are registered."""


on_register: list[Callable[[Collective], None]] = []
"""Told of every plugin that becomes known by its name; what depends on the registry adds itself."""

_registered: dict[str, Collective] = {}
_loaded_points: set[tuple[str, str]] = set()
_loading = threading.RLock()
_broken_points: dict[str, UnsupportedError] = {}
"""Why an entry point gave no plugin, by the entry point's name."""


def register(collective: Collective) -> Collective:
    """Make a plugin known by its name. Registering the same class again replaces its instance.

    Raises:
        InvalidArgumentError: No plugin, without a name, or the name belongs to another class.
    """
    load_builtins()  # their names are taken, whoever comes first
    return _add(collective)


def _add(collective: Collective) -> Collective:
    check_collective(collective)
    known = _registered.get(collective.name)
    if known is not None and type(known) is not type(collective):
        raise InvalidArgumentError(
            f"name={collective.name!r} belongs to {type(known).__qualname__}; choose another name"
        )
    for listener in on_register:  # first: what one of them refuses is not registered
        listener(collective)
    if known is not None:
        known.registered = False
    collective.registered = True
    _registered[collective.name] = collective
    return collective


def for_count(collective: Collective, count: object) -> Collective:
    """Return the plugin for calls with `count` tensors.

    Raises:
        InvalidArgumentError: No number, or the collective takes another.
    """
    if isinstance(count, bool) or not isinstance(count, int):
        raise InvalidArgumentError(
            f"tensors={count!r} is no number; give how many tensors a call takes",
            op=collective.name,
        )
    found = collective.for_inputs(count)
    if found.num_inputs != count:
        raise InvalidArgumentError(
            f"tensors={count}, but {collective.name} takes {found.num_inputs}; leave tensors out",
            op=collective.name,
        )
    return found


def registered() -> list[Collective]:
    """Return the plugins that are registered so far; no entry point is looked at."""
    return list(_registered.values())


def load_builtins() -> None:
    """Register the plugins that come along."""
    for name in BUILT_IN_MODULES:
        module = importlib.import_module(f".{name}", __package__)
        for collective in module.COLLECTIVES:
            if collective.name not in _registered:
                _add(collective)


def _load_entry_points() -> None:
    """Load what has not been tried yet. A package that fails costs nobody but its own callers."""
    points = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
    for point in sorted(points, key=lambda one: (_package(one), one.name)):  # alike on all ranks
        if (point.name, point.value) in _loaded_points:
            continue
        _loaded_points.add((point.name, point.value))
        try:
            loaded = point.load()
            plugin = loaded() if isinstance(loaded, type) else loaded
            known = _registered.get(getattr(plugin, "name", ""))
            if known is None or type(known) is not type(plugin):  # else `register` came first
                _add(plugin)
        except (Exception, SystemExit) as error:
            _broken_points[point.name] = broken = UnsupportedError(
                f"plugin {point.name!r} ({point.value}, package {_package(point) or 'unknown'}) "
                f"does not load: {type(error).__name__}: {error}; mend or uninstall its package",
                reason=f"entry point {point.name} failed",
                op=point.name,
            )
            broken.__cause__ = error
            warnings.warn(str(broken), CommWarning, stacklevel=3)


def _package(point: importlib.metadata.EntryPoint) -> str:
    """Return the name of the distribution that an entry point belongs to, if it is known."""
    distribution = getattr(point, "dist", None)
    return "" if distribution is None else str(distribution.name)


def collectives() -> dict[str, Collective]:
    """Return every registered plugin by name: built-in, then third-party entry points.

    Warns once, with CommWarning, of each entry point that gives none.
    """
    load_builtins()
    with _loading:  # ranks that are threads must see the same
        _load_entry_points()
    return dict(_registered)


def find(name: str) -> Collective:
    """Return the plugin `name`.

    Raises:
        InvalidArgumentError: No plugin has that name; lists those that exist.
        UnsupportedError: The package that offers it does not load.
    """
    known = _registered.get(name)  # one look-up: every call comes by
    if known is not None:
        return known
    collectives()
    if name in _registered:
        return _registered[name]
    if name in _broken_points:
        broken = _broken_points[name]
        raise UnsupportedError(broken.args[0], reason=broken.reason, op=name) from broken.__cause__
    failed = f"; {', '.join(sorted(_broken_points))} did not load" if _broken_points else ""
    raise InvalidArgumentError(
        f"op={name!r} is unknown; registered are {', '.join(sorted(_registered))}{failed}"
    )
