"""What is said of a name that is not known: the names that there are, and the one it resembles; and
of a text that is no number.

Knows no names of its own.
"""

from __future__ import annotations

from collections.abc import Iterable


def none_of(name: object, names: Iterable[object]) -> str:
    """ "'mixd' is none of mixed, fcfs; did you mean 'mixed'?" """
    known = [str(one) for one in names]
    return f"{name!r} is none of {', '.join(known)}{did_you_mean(str(name), known)}"


def no_number(text: object, kind: str) -> str:
    """ "'many' is no whole number"; `kind`: int or float."""
    return f"{text!r:.60} is no {'whole number' if kind == 'int' else 'number'}"


def did_you_mean(name: str, names: Iterable[str], quote: str = "'") -> str:
    """The end of an error, "; did you mean 'mixed'?", or nothing if no name is close."""
    import difflib  # only here: the command line's start pays for every import

    by_lower = {known.lower(): known for known in names}
    close = difflib.get_close_matches(name.lower(), by_lower, 1)
    return f"; did you mean {quote}{by_lower[close[0]]}{quote}?" if close else ""
