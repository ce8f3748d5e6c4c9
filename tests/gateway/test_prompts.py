"""A client's line for its maker is no part of a system message; other texts stay as they are."""

from __future__ import annotations

import pytest

from pipeinfer.gateway.requests import BILLING_HEADER, without_billing_header

LINE = f"{BILLING_HEADER} cc_version=2.1; cch=7adab;"
USER = {"role": "user", "content": "Hello"}


def system(content):
    return {"role": "system", "content": content}


def parts(*texts):
    return [{"type": "text", "text": text} for text in texts]


@pytest.mark.parametrize(
    ("content", "left"),
    [
        (f"{LINE}\nBe short.", "Be short."),
        (f"{LINE}\n\nBe short.\n\nOr not.", "Be short.\n\nOr not."),
        (parts(LINE, "Be short."), parts("Be short.")),
        (parts("Be short.", f"{LINE}\nOr not."), parts("Be short.", "Or not.")),
        ("Be short.", "Be short."),
        (f"Quote: {LINE}", f"Quote: {LINE}"),
        (parts("a", ""), parts("a", "")),
    ],
)
def test_the_line_goes_and_the_rest_stays(content, left) -> None:
    assert without_billing_header([system(content), USER]) == [system(left), USER]


def test_a_message_of_nothing_else_goes_unless_it_is_all_there_is() -> None:
    assert without_billing_header([system(LINE), USER]) == [USER]
    assert without_billing_header([system(parts(LINE)), USER]) == [USER]
    assert without_billing_header([system(LINE)]) == [system(LINE)]


def test_what_others_say_is_theirs() -> None:
    said = [{"role": role, "content": LINE} for role in ("user", "assistant", "tool")]
    assert without_billing_header(said) == said
