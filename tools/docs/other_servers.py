"""The page of what vLLM and SGLang have, and what there is here: from other_servers.py.

Tables, since whoever comes looks a name up.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from docs.markdown import codes, table
from docs.markdown import page as page_of
from pipeinfer.other_servers import ENDPOINTS, FLAGS, METRICS, VARIABLES, Flag, Row

INTRODUCTION = """What a command line, a client and a dashboard of vLLM 0.26 and SGLang 0.5 find \
here. [From vLLM](../start/from-vllm.md) and [from SGLang](../start/from-sglang.md) say how to \
begin. [Requests](requests.md) lists fields of requests by the server that has them.

- *Same*: the flag has this name and this meaning here.
- *Alias*: the flag is understood, and sets what the second column says.
- *Instead*: the flag is an error, which says to use the second column.
- *Always*: the flag is an error, because things are so without it.
- *None*: the flag is an error, because nothing here is like it."""


def page() -> str:
    """docs/reference/other-servers.md."""
    return page_of("Other servers", INTRODUCTION, *_flags(), *_rest())


def _flags() -> Iterator[str]:
    for server, sections in FLAGS.items():
        yield f"## Flags of {server}"
        for section, flags in sections.items():
            yield f"### {server}: {section}"
            yield table((server, "here", "kind", "notes"), map(_flag, flags))


def _flag(flag: Flag) -> tuple[str, str, str, str]:
    ours = "`MODEL`" if flag.ours == ("MODEL",) else codes(flag.ours)
    return codes(flag.theirs), ours, flag.kind, flag.said


def _rest() -> Iterator[str]:
    yield "## Environment variables"
    yield "Each setting is a variable: `--kv-pages` is `PIPEINFER_KV_PAGES`."
    yield _table(VARIABLES)
    yield "## Endpoints"
    yield _table(ENDPOINTS)
    yield "## Metrics"
    yield "Metrics have no label of the model here, because there is one model."
    yield _table(METRICS)


def _table(rows: Iterable[Row]) -> str:
    shown = ((codes(row.theirs), codes(row.ours) or "none", row.said) for row in rows)
    return table(("there", "here", "notes"), shown)
