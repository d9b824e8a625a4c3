"""Plain values as one line of JSON: all that passes between a candidate and its tests."""

import json
import types
from collections.abc import Callable, Iterator
from typing import Any

LINE_LIMIT = 1 << 24
"""Bytes of a line, its end included."""

_VIEWS = (type({}.keys()), type({}.values()), type({}.items()))
_ITEMS: dict[str, tuple[tuple[type, ...], Callable[[list[Any]], Any]]] = {
    "list": ((list,), list),
    "tuple": ((tuple,), tuple),
    "set": ((set,), set),
    "frozenset": ((frozenset,), frozenset),
    "iterator": ((Iterator, types.GeneratorType, *_VIEWS), iter),
}


def dumps(value: Any) -> bytes:
    """Return a line that `loads` reads. Subclasses become their plain type, generators iterators.

    Raises:
        TypeError: ``value`` holds something that is not plain data.
    """
    return json.dumps(_tagged(value)).encode() + b"\n"


def loads(line: bytes) -> Any:
    """Return the value of a line. Whatever the line says, only plain data comes out.

    Raises:
        ValueError: the line is not one of `dumps`.
    """
    try:
        return _untagged(json.loads(line))
    except (TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"not a line of values: {error}") from error


def _tagged(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, dict):
        return {"dict": [[_tagged(key), _tagged(item)] for key, item in dict.items(value)]}
    if isinstance(value, bytes | bytearray):
        return {"bytes": bytes(value).hex()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, range):
        return {"range": [value.start, value.stop, value.step]}
    for tag, (kinds, _) in _ITEMS.items():
        if isinstance(value, kinds):
            return {tag: [_tagged(item) for item in value]}
    raise TypeError(f"{type(value).__name__} is not plain data")


def _untagged(tagged: Any) -> Any:
    if not isinstance(tagged, dict):
        return tagged
    ((tag, content),) = tagged.items()
    if tag == "dict":
        return {_untagged(key): _untagged(item) for key, item in content}
    if tag == "bytes":
        return bytes.fromhex(content)
    if tag == "complex":
        return complex(*content)
    if tag == "range":
        return range(*content)
    return _ITEMS[tag][1]([_untagged(item) for item in content])
