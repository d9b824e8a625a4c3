"""Views: the four layouts of the published protocol, by name of block."""

from __future__ import annotations

import pytest

from hogwild_engine.api.layout import LAYOUTS, Layout, SharedBlocks

SHARED = SharedBlocks("prompt+history", "others:", "<...>", "own:")
BARE: SharedBlocks[str] = SharedBlocks("prompt+history")


def views(
    layout: Layout | str, num_workers: int, shared: SharedBlocks[str] = SHARED
) -> list[list[str]]:
    names = "abcde"[:num_workers]
    layout = LAYOUTS[layout] if isinstance(layout, str) else layout
    return [layout.view(shared, [o for o in names if o != own], own) for own in names]


@pytest.mark.parametrize("num_workers", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_common_block_is_first_and_the_own_block_last(layout: str, num_workers: int) -> None:
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


def test_combined_of_five_separates_every_other_from_the_next() -> None:
    assert views("combined", 5)[2] == [
        *("prompt+history", "others:", "a", "<...>", "b", "<...>", "d", "<...>", "e", "own:", "c")
    ]


def test_combined_without_header_texts_has_no_header_blocks() -> None:
    assert views("combined", 3, BARE)[1] == ["prompt+history", "a", "c", "b"]


def test_combined_of_one_shows_no_headers() -> None:
    assert views("combined", 1) == [["prompt+history", "a"]]


def test_contiguous_shows_others_texts_without_headers() -> None:
    assert views("contiguous", 3, BARE) == [
        ["prompt+history", "b", "c", "a"],
        ["prompt+history", "a", "c", "b"],
        ["prompt+history", "a", "b", "c"],
    ]


def test_interleaved_shows_finished_paragraphs_only() -> None:
    assert views("interleaved", 3) == [["prompt+history", own] for own in "abc"]


def test_arrival_shows_the_block_that_all_write() -> None:
    view = LAYOUTS["arrival"].view(BARE, ["stream", "stream"], "stream")
    assert view == ["prompt+history", "stream"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_isolated_workers_never_see_each_other(layout: str) -> None:
    isolated = LAYOUTS[layout].isolated()
    assert views(isolated, 4) == [["prompt+history", own] for own in "abcd"]
    assert not isolated.moves_paragraphs


def test_the_answer_sees_everything_that_was_written() -> None:
    combined = LAYOUTS["combined"]
    assert combined.answer_context(SHARED, "ab") == [
        *("prompt+history", "others:", "a", "<...>", "b", "<...>")
    ]
    assert combined.answer_context(SHARED, "") == ["prompt+history"]
    assert LAYOUTS["interleaved"].answer_context(BARE, "ab") == ["prompt+history", "a", "b"]


def test_paragraphs_move_if_there_is_a_history() -> None:
    moving = [layout.name for layout in LAYOUTS.values() if layout.moves_paragraphs]
    headed = [layout.name for layout in LAYOUTS.values() if layout.has_headers]
    assert moving == ["combined", "interleaved"]
    assert headed == ["combined"]
