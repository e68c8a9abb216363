"""A host as JSON, exactly: what is written is read back equal. Also writes the JSON Schema."""

from __future__ import annotations

import functools
import json
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

from ..errors import InvalidArgumentError
from .model import FORMAT, Host

SCHEMA_ID = "https://json-schema.org/draft/2020-12/schema"


def to_json(host: Host) -> str:
    """Return a host as JSON with one line for each fact."""
    return json.dumps(plain(host), indent=1, ensure_ascii=False) + "\n"


def plain(value: Any) -> Any:
    """Return a record as dictionaries and lists; mappings in the order of their keys."""
    if is_dataclass(value):
        return {item.name: plain(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: plain(value[key]) for key in sorted(value)}
    return value


def from_json(text: str, source: str) -> Host:
    """Read what `to_json` wrote.

    Raises:
        InvalidArgumentError: It is no JSON, not of this format, or a field is missing or wrong.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"file={source} is no JSON: {error}") from error
    found = data.get("format") if isinstance(data, dict) else None
    if found != FORMAT:
        raise InvalidArgumentError(
            f"file={source} has format={found!r}, wanted {FORMAT!r}; write it with "
            "`pcie-comm topo --json`"
        )
    try:
        host: Host = _build(Host, data, "host")
    except ValueError as error:
        raise InvalidArgumentError(f"file={source}: {error}") from error
    return host


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _build(kind: Any, data: Any, where: str) -> Any:
    """Return `data` as a value of the annotation `kind`. Raises ValueError where it is none."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        if data is None and type(None) in arguments:
            return None
        return _build(next(item for item in arguments if item is not type(None)), data, where)
    if is_dataclass(kind):
        return _record(typing.cast("type", kind), data, where)
    if origin is tuple and isinstance(data, list):
        return tuple(_build(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(data))
    if isinstance(origin, type) and issubclass(origin, Mapping) and isinstance(data, dict):
        return {key: _build(arguments[1], item, f"{where}.{key}") for key, item in data.items()}
    if kind is float and isinstance(data, (int, float)) and not isinstance(data, bool):
        return float(data)
    if isinstance(kind, type) and type(data) is kind:
        return data
    raise ValueError(f"{where} is {str(data)[:60]!r}, wanted {getattr(kind, '__name__', kind)}")


def _record(kind: type, data: Any, where: str) -> Any:
    if not isinstance(data, dict):
        raise ValueError(f"{where} is no object")
    hints = _hints(kind)
    if surplus := sorted(set(data) - set(hints)):
        raise ValueError(f"{where} has the unknown field {surplus[0]!r}")
    if missing := [item.name for item in fields(kind) if _needed(item) and item.name not in data]:
        raise ValueError(f"{where} has no {missing[0]!r}")
    return kind(**{name: _build(hints[name], data[name], f"{where}.{name}") for name in data})


def _needed(item: Any) -> bool:
    return item.default is MISSING and item.default_factory is MISSING


def schema() -> dict[str, Any]:
    """Return the JSON Schema of what `to_json` writes; host.schema.json is this."""
    definitions: dict[str, Any] = {}
    top = _schema_of(Host, definitions)
    return {"$schema": SCHEMA_ID, "title": FORMAT, **top, "$defs": definitions}


def _schema_of(kind: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        inner = next(item for item in arguments if item is not type(None))
        return {"anyOf": [_schema_of(inner, definitions), {"type": "null"}]}
    if is_dataclass(kind):
        _define(typing.cast("type", kind), definitions)
        return {"$ref": f"#/$defs/{typing.cast('type', kind).__name__}"}
    if origin is tuple:
        return {"type": "array", "items": _schema_of(arguments[0], definitions)}
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {"type": "object", "additionalProperties": _schema_of(arguments[1], definitions)}
    names = {str: "string", bool: "boolean", int: "integer", float: "number"}
    return {"type": names[kind]}


def _define(kind: type, definitions: dict[str, Any]) -> None:
    if kind.__name__ in definitions:
        return
    definitions[kind.__name__] = {}
    properties = {name: _schema_of(hint, definitions) for name, hint in _hints(kind).items()}
    if kind is Host:
        properties["format"] = {"const": FORMAT}
    definitions[kind.__name__] = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
