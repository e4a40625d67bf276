"""Stop strings over text that comes in pieces: whatever the pieces, the text ends where the whole one would."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpaged.stop_strings import StopStrings


def expected(text: str, stop: list[str], include: bool) -> tuple[str, str | None]:
    """By trying every end of the text in turn."""
    for end in range(1, len(text) + 1):
        for one in sorted(stop, key=len, reverse=True):
            if text[:end].endswith(one):
                return text[: end if include else end - len(one)], one
    return text, None


@settings(max_examples=2000, deadline=None)
@given(
    st.lists(st.text("abé", max_size=4), max_size=12),
    st.lists(st.text("abé", min_size=1, max_size=4), max_size=4),
    st.booleans(),
)
def test_pieces_make_no_difference(pieces: list[str], stop: list[str], include: bool) -> None:
    stops, shown = StopStrings(stop, include_stop_str_in_output=include), ""
    text, found = expected("".join(pieces), stop, include)
    for piece in pieces:
        shown += stops.add(piece)
        assert text.startswith(shown)  # nothing of a stop string is ever shown
    shown += stops.finish()
    assert (shown, stops.found) == (text, found)


@pytest.mark.parametrize(
    ("pieces", "stop", "shown"),
    [
        (["Hel", "lo. ", "Bye"], [". B"], ["Hel", "lo", ""]),
        (["Hel", "lo. ", "Bye"], ["."], ["Hel", "lo", ""]),
        (["<", "|", "end", "|>"], ["<|end|>"], ["", "", "", ""]),
        (["<", "|", "else"], ["<|end|>"], ["", "", "<|else"]),
        (["stopper"], ["stop", "stopper"], [""]),  # the one that is complete first
        (["xaab"], ["b", "ab", "aab"], ["x"]),  # the longest of those that end together
        (["aa", "ab"], ["aab"], ["", "a"]),  # it begins again within itself
    ],
)
def test_cases(pieces: list[str], stop: list[str], shown: list[str]) -> None:
    stops = StopStrings(stop, include_stop_str_in_output=False)
    assert [stops.add(piece) for piece in pieces] == shown


def test_without_stop_strings_nothing_waits() -> None:
    stops = StopStrings((), include_stop_str_in_output=False)
    assert [stops.add("ab"), stops.add("c"), stops.finish()] == ["ab", "c", ""]
