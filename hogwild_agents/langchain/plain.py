"""Settings as plain data, and back: for tracers, caches, LangChain's ``dumps`` and ``loads``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, is_dataclass
from typing import Any

from langchain_core.load import Serializable
from langchain_core.load.load import ALL_SERIALIZABLE_MAPPINGS, _default_class_paths_cache

from hogwild_agents.langchain.bindings import to_schema, to_tools
from hogwild_engine.api.errors import require
from hogwild_engine.api.grammar import Grammar
from hogwild_engine.api.protocol import Protocol
from hogwild_engine.api.request import Worker, make_workers

_CLASSES: dict[str, type] = {"protocol": Protocol, "grammar": Grammar, "worker_grammar": Grammar}


def to_plain(name: str, value: Any) -> Any:
    """Return a setting, or what is bound to a call, as data that JSON can hold.

    Tools and formats become schemas, workers a list. What cannot be used is returned by its
    ``repr``, as far as JSON cannot hold it: the call itself will refuse it.
    """
    with suppress(Exception):
        if name == "workers" and not isinstance(value, Iterator):
            value = [asdict(worker) for worker in make_workers(from_plain(name, value))]
        elif name == "tools" and isinstance(value, Sequence):
            value = to_tools(value)
        elif name == "response_format" and not isinstance(value, Mapping | None):
            value = to_schema(value)
    return _as_json(value)


def _as_json(value: Any) -> Any:
    try:
        return json.loads(json.dumps(value, default=_replacement))
    except (TypeError, ValueError, RecursionError):  # keys that JSON cannot hold, or a circle
        return repr(value)


def _replacement(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return dict(value) if isinstance(value, Mapping) else repr(value)


def from_plain(name: str, value: Any) -> Any:
    """Return the objects that `to_plain` made plain: workers, a protocol or a grammar.

    Raises:
        ConfigError: a field is unknown, or missing.
    """
    if name == "workers" and isinstance(value, list | tuple):
        return [_built(name, Worker, m) if isinstance(m, Mapping) else m for m in value]
    if name in _CLASSES and isinstance(value, Mapping):
        return _built(name, _CLASSES[name], value)
    return value


def _built(name: str, kind: type, values: Mapping[str, Any]) -> Any:
    given = {key: tuple(v) if isinstance(v, list) else v for key, v in values.items()}
    try:
        return kind(**given)
    except TypeError as error:
        require(False, name, f"the fields of a {kind.__name__}", dict(values), str(error))
        raise AssertionError from error


def allow_loading(kind: type[Serializable]) -> None:
    """Let LangChain's ``loads`` build a class where the caller names its package.

    ``loads(text, valid_namespaces=["hogwild_agents"], allowed_objects="all")``: "all" means all
    classes of a table in LangChain core, which lists its partners' packages.
    """
    path = tuple(kind.lc_id())
    ALL_SERIALIZABLE_MAPPINGS[path] = path
    _default_class_paths_cache.pop("all", None)
