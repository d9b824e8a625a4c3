"""The constants and structs of csrc/structs.h, parsed: C and Python share one declaration."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any

HEADER = Path(__file__).parent / "csrc" / "structs.h"

_TYPES = {"int32_t": ctypes.c_int32, "int64_t": ctypes.c_int64, "float": ctypes.c_float}
_COMMENT = re.compile(r"//[^\n]*")
_CONSTANT = re.compile(r"(\w+) = (\d+)")
_STRUCT = re.compile(r"typedef struct \{([^}]*)\} (\w+);")


def parse(header: str) -> tuple[dict[str, int], dict[str, type[ctypes.Structure]]]:
    """Return the constants and the structs of a header, by name.

    Raises:
        ValueError: a field has a type that is not known.
    """
    text = _COMMENT.sub("", header)
    structs: dict[str, type[ctypes.Structure]] = {}
    for body, name in _STRUCT.findall(text):
        fields = [
            field
            for line in body.split(";")
            if line.strip()
            for field in _fields(line.split(), structs)
        ]
        structs[name] = type(name, (ctypes.Structure,), {"_fields_": fields})
    return {name: int(value) for name, value in _CONSTANT.findall(text)}, structs


def _fields(words: list[str], structs: dict[str, Any]) -> list[tuple[str, Any]]:
    """``const float *cos, *sin`` is two pointers, ``int32_t a, b`` two numbers."""
    kind, *names = [word for word in words if word != "const"]
    known: Any = _TYPES.get(kind) or structs.get(kind)
    is_pointer = names[0].startswith("*")
    if known is None and not is_pointer:
        raise ValueError(f"structs.h: wanted one of {[*_TYPES, *structs]}, got {kind!r}")
    return [(name.strip("*,"), ctypes.c_void_p if is_pointer else known) for name in names]


CONSTANTS, STRUCTS = parse(HEADER.read_text(encoding="utf-8"))
AttentionParams: Any = STRUCTS["AttentionParams"]
Matrix: Any = STRUCTS["Matrix"]
Layer: Any = STRUCTS["Layer"]
LayerKind: Any = STRUCTS["LayerKind"]
Activations: Any = STRUCTS["Activations"]
