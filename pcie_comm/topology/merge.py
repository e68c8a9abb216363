"""Puts several views of one host together. The first that knows a fact gives it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

from .model import Gpu, Host, LabelMatrix, Measurement, Pair, Record
from .probed import renamed

R = TypeVar("R", bound=Record)

PROBED = ("measurements", "checks", "exchanges", "ladders", "patterns", "loads")
"""Fields of a host to which every view adds its own."""


def fill(first: R, second: R) -> R:
    """Return `first` with what it does not know taken from `second`, reasons kept."""
    values: dict[str, Any] = {}
    reasons = {**getattr(second, "unknown", {}), **getattr(first, "unknown", {})}
    for item in fields(first):
        one, other = getattr(first, item.name), getattr(second, item.name)
        if isinstance(one, Record) and isinstance(other, type(one)):
            values[item.name] = fill(one, other)
        elif one is None and other is not None:
            values[item.name] = other
    if "unknown" in {item.name for item in fields(first)}:
        values["unknown"] = reasons
    return replace(first, **values)


def merge(hosts: Sequence[Host]) -> Host:
    """Return one host from views of it; views with a tree or with UUIDs come first.

    GPUs are matched by PCI address; where a view has none, by their order, if the number is the
    same. Both are in the remarks.
    """
    ranked = sorted(hosts, key=lambda host: (host.nodes is None, not _has_names(host)))
    whole = ranked[0]
    for other in ranked[1:]:
        whole = _add(whole, other)
    return whole


def _has_names(host: Host) -> bool:
    return any(gpu.address or gpu.uuid for gpu in host.gpus or ())


def _add(whole: Host, other: Host) -> Host:
    names, remark = _match(whole.gpus, other.gpus, other.sources[0])
    if whole.gpus is not None and other.gpus is not None and names is None:
        other = replace(other, gpus=None, unknown={**other.unknown, "gpus": remark})
        return replace(fill(whole, _nameless(other)), remarks=(*whole.remarks, remark))
    filled = fill(whole, with_names(other, names or {}))
    gpus = whole.gpus
    if gpus is not None and other.gpus is not None and names is not None:
        by_name = {names[gpu.name]: gpu for gpu in other.gpus}
        gpus = tuple(
            fill(gpu, replace(by_name[gpu.name], name=gpu.name)) if gpu.name in by_name else gpu
            for gpu in gpus
        )
    translated = with_names(other, names or {})
    both: dict[str, Any] = {
        name: (*getattr(whole, name), *getattr(translated, name)) for name in PROBED
    }
    return replace(
        filled,
        sources=(*whole.sources, *other.sources),
        gpus=gpus if gpus is not None else other.gpus,
        **both,
        loose_acs=(*whole.loose_acs, *other.loose_acs),
        remarks=(*whole.remarks, *other.remarks, *((remark,) if remark else ())),
    )


def _nameless(host: Host) -> Host:
    """Return a view without what names GPUs that could not be matched."""
    reasons = {**host.unknown, "driver_labels": "not matched", "pairs": "not matched"}
    nothing: dict[str, Any] = dict.fromkeys(PROBED, ())
    return replace(host, driver_labels=None, pairs=None, unknown=reasons, **nothing)


def _match(
    gpus: Sequence[Gpu] | None, others: Sequence[Gpu] | None, source: str
) -> tuple[dict[str, str] | None, str]:
    """Return the name of each other GPU in the whole, and a remark; None if that is unknown."""
    if gpus is None or others is None:
        return {}, ""
    by_address = {gpu.address: gpu.name for gpu in gpus if gpu.address}
    names = {gpu.name: by_address.get(gpu.address or "", "") for gpu in others}
    if names and all(names.values()):
        return names, ""
    if len(gpus) == len(others):
        names = {other.name: gpu.name for gpu, other in zip(gpus, others, strict=True)}
        return names, f"GPUs of {source} were matched by their order"
    return None, f"{source} has {len(others)} GPUs and the rest {len(gpus)}: left out"


def with_names(host: Host, names: Mapping[str, str]) -> Host:
    """Return a host whose GPUs have other names; those that are not given stay."""

    def new(name: str) -> str:
        return names.get(name, name)

    def pair(item: Pair) -> Pair:
        return replace(item, source=new(item.source), target=new(item.target))

    def matrix(item: LabelMatrix) -> LabelMatrix:
        rows, columns = tuple(map(new, item.rows)), tuple(map(new, item.columns))
        return replace(item, rows=rows, columns=columns)

    def figures(item: Measurement) -> Measurement:
        rows, columns = tuple(map(new, item.rows)), tuple(map(new, item.columns))
        return replace(renamed(item, new), rows=rows, columns=columns)

    return replace(
        host,
        gpus=None if host.gpus is None else tuple(replace(g, name=new(g.name)) for g in host.gpus),
        driver_labels=None if host.driver_labels is None else matrix(host.driver_labels),
        pairs=None if host.pairs is None else tuple(map(pair, host.pairs)),
        measurements=tuple(map(figures, host.measurements)),
        checks=tuple(renamed(one, new) for one in host.checks),
        exchanges=tuple(renamed(one, new) for one in host.exchanges),
        ladders=tuple(renamed(one, new) for one in host.ladders),
        patterns=tuple(renamed(one, new) for one in host.patterns),
        loads=tuple(renamed(one, new) for one in host.loads),
    )
