"""Python reads the structs of the C code from their header."""

from __future__ import annotations

import ctypes

import pytest

from hogwild_kernels.cpu import structs


def test_fields_follow_the_header() -> None:
    constants, parsed = structs.parse(
        """
        enum { LANES = 16 };  // of a vector
        enum { A = 1, B = 22 };
        typedef struct {
          const float *cos, *sin;  // [T]; two pointers
          int32_t first, second;
          int64_t stride;
        } Inner;
        typedef struct {
          Inner one, two;
          float scale;
        } Outer;
        """
    )
    assert constants == {"LANES": 16, "A": 1, "B": 22}
    assert [name for name, *_ in parsed["Inner"]._fields_] == [
        "cos",
        "sin",
        "first",
        "second",
        "stride",
    ]
    assert ctypes.sizeof(parsed["Inner"]) == 32
    assert parsed["Outer"].two.offset == 32
    assert ctypes.sizeof(parsed["Outer"]) == 72


def test_a_type_that_is_not_known_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"^structs.h: wanted one of .*int32_t.*, got 'double'$"):
        structs.parse("typedef struct { double scale; } Params;")
