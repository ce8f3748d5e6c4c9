"""The end of a text by a stop string, against a search in the whole text after every piece."""

from __future__ import annotations

import time

from hypothesis import example, given, settings
from hypothesis import strategies as st

from pipeinfer.detokenizer.text import StopStrings

LETTERS = st.sampled_from("ab")
STOPS = st.lists(st.text(LETTERS, min_size=1, max_size=5), min_size=1, max_size=3)
TEXT_PIECES = st.lists(st.text(LETTERS, max_size=4), max_size=14)


def naive_hit(before: str, piece: str, stops: list[str]) -> tuple[int, str] | None:
    """The first occurrence that ends inside `piece`; the order of `stops` settles ties."""
    text = before + piece
    for start in range(len(text)):
        for stop in stops:
            if text.startswith(stop, start) and start + len(stop) > len(before):
                return start, stop
    return None


def naive_held(text: str, stops: list[str]) -> int:
    """The length of the longest suffix that a stop string begins with, all of one excepted."""
    lengths = [n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n])]
    return max(lengths)


@settings(max_examples=500, deadline=None)
@given(pieces=TEXT_PIECES, stops=STOPS, include=st.booleans(), unarmed=st.integers(0, 6))
@example(pieces=["aab", "ab"], stops=["abab", "b"], include=False, unarmed=1)
@example(pieces=["abab"], stops=["bab", "ab", "aba"], include=True, unarmed=0)
def test_cut_and_held_text_equal_a_search_in_the_whole_text(
    pieces: list[str], stops: list[str], include: bool, unarmed: int
) -> None:
    watch = StopStrings(stops, include)
    text = shown = ""
    for number, piece in enumerate(pieces):
        armed = number >= unarmed
        new, hit = watch.feed(piece, armed)
        shown += new
        expected = naive_hit(text, piece, stops) if armed else None
        text += piece
        if expected is not None:
            start, stop = expected
            assert (shown, hit) == (text[: start + len(stop) if include else start], stop)
            return
        assert hit is None
        assert shown == text[: len(text) - naive_held(text, stops)]
    assert shown + watch.flush() == text


def test_a_stop_string_is_found_across_pieces() -> None:
    watch = StopStrings(["\n\nHuman:"], False)
    assert watch.feed("Yes.\n") == ("Yes.", None)
    assert watch.feed("\nHum") == ("", None)
    assert watch.feed("an: more") == ("", "\n\nHuman:")


def test_a_false_start_is_shown_as_soon_as_it_is_known_to_be_one() -> None:
    watch = StopStrings(["STOP"], False)
    assert watch.feed("a STO") == ("a ", None)
    assert watch.feed("NE") == ("STONE", None)
    assert watch.flush() == ""


def test_the_cost_of_a_token_does_not_grow_with_the_held_text() -> None:
    """A stop string of 20,000 characters that nearly matches everywhere; seconds if quadratic."""
    size = 20_000
    watch = StopStrings(["a" * size + "b"], False)
    start = time.process_time()
    shown = "".join(watch.feed("aaaa")[0] for _ in range(size // 2))
    assert len(shown) == size  # all but the longest possible prefix
    assert time.process_time() - start < 2
