"""Views: the four layouts of the published protocol, by name of block."""

from __future__ import annotations

import pytest

from hogwild_engine.api.layout import (
    LAYOUTS,
    LayoutName,
    Parts,
    moves_paragraphs,
    shows_headers,
    view,
)

PARTS = Parts("prompt+history", "others:", "<...>", "own:")
BARE = Parts("prompt+history", None, None, None)


def views(
    layout: LayoutName, num_workers: int, parts: Parts[str] = PARTS, *, sees_others: bool = True
) -> list[list[str]]:
    names = "abcde"[:num_workers]
    return [
        view(layout, parts, [o for o in names if o != own], own, sees_others=sees_others)
        for own in names
    ]


@pytest.mark.parametrize("num_workers", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_common_block_is_first_and_the_own_block_last(
    layout: LayoutName, num_workers: int
) -> None:
    for own, seen in zip("abcde", views(layout, num_workers), strict=False):
        assert seen[0] == "prompt+history"
        assert seen[-1] == own
        assert seen.count(own) == 1


def test_combined_shows_others_between_headers() -> None:
    assert views("combined", 3) == [
        ["prompt+history", "others:", "b", "<...>", "c", "own:", "a"],
        ["prompt+history", "others:", "a", "<...>", "c", "own:", "b"],
        ["prompt+history", "others:", "a", "<...>", "b", "own:", "c"],
    ]


def test_combined_of_two_has_one_other() -> None:
    assert views("combined", 2) == [
        ["prompt+history", "others:", "b", "own:", "a"],
        ["prompt+history", "others:", "a", "own:", "b"],
    ]


def test_combined_of_five_parts_every_other_from_the_next() -> None:
    assert views("combined", 5)[2] == [
        *("prompt+history", "others:", "a", "<...>", "b", "<...>", "d", "<...>", "e", "own:", "c")
    ]


def test_combined_without_header_texts_has_no_header_blocks() -> None:
    assert views("combined", 3, BARE)[1] == ["prompt+history", "a", "c", "b"]


def test_combined_of_one_shows_no_headers() -> None:
    assert views("combined", 1) == [["prompt+history", "a"]]


def test_contiguous_shows_others_texts_without_headers() -> None:
    assert views("contiguous", 3) == [
        ["prompt+history", "b", "c", "a"],
        ["prompt+history", "a", "c", "b"],
        ["prompt+history", "a", "b", "c"],
    ]


def test_interleaved_shows_finished_paragraphs_only() -> None:
    assert views("interleaved", 3) == [["prompt+history", own] for own in "abc"]


def test_arrival_shows_the_block_that_all_write() -> None:
    assert view("arrival", BARE, ["stream", "stream"], "stream") == ["prompt+history", "stream"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_unsynchronised_workers_see_nobody(layout: LayoutName) -> None:
    wanted = [["prompt+history", own] for own in "abcd"]
    assert views(layout, 4, sees_others=False) == wanted


def test_paragraphs_move_where_there_is_a_history() -> None:
    assert [name for name in LAYOUTS if moves_paragraphs(name)] == ["combined", "interleaved"]
    assert [name for name in LAYOUTS if shows_headers(name)] == ["combined"]
