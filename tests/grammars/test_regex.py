"""Digits of a form's regular expression are 0 to 9, unless it says what does not match."""

import pytest

from pipeinfer.grammars.regex import with_plain_digits


@pytest.mark.parametrize(
    ("pattern", "plain"),
    [
        (r"\d{3}", "[0-9]{3}"),
        (r"[\d.]-\d", "[0-9.]-[0-9]"),
        (r"[]\d]\d", "[]0-9][0-9]"),
        (r"[\]\d]", r"[\]0-9]"),
        (r"[a[\d]]\d", "[a[0-9]][0-9]"),
        (r"[^\d]\D[\D]", r"[^\d]\D[\D]"),
        (r"[^a[\d]]\d", r"[^a[\d]][0-9]"),
        (r"\\d\\\d", r"\\d\\[0-9]"),
        (r"\w\s]\d", r"\w\s][0-9]"),
        ("a\\", "a\\"),
        ("", ""),
    ],
)
def test_digits_are_plain_where_they_match(pattern, plain):
    assert with_plain_digits(pattern) == plain
