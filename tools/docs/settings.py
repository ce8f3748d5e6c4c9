"""The page of all settings: from Settings, whose fields carry their help.

Each has a heading that other pages link: its flag without dashes in front.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby

from docs.markdown import bullets, codes, sentence
from docs.markdown import page as page_of
from pipeinfer import other_servers
from pipeinfer.settings import PREFIX, SettingHelp, Settings, settings_help

INTRODUCTION = """Each setting is

- a flag of `pipeinfer serve`, `generate`, `chat` and `doctor`, and of every stage: \
`--kv-pages 4000`;
- an environment variable: `PIPEINFER_KV_PAGES=4000`; an empty value counts as not given;
- a key of the table `[settings]` of a [topology file](../topology.md): `kv_pages = 4000`;
- a keyword of `LLM(...)` and `AsyncLLM(...)`: `kv_pages=4000`.

A flag goes before the environment, the environment before the topology file, the topology file \
before the default. A wrong value ends the process with code 2 and one line that names the flag."""


# Of the file of API keys, and of the two targets: more than a field's help should be.
KEY_FILE = """The file holds the key, so that the key stands in no environment. Or the file holds \
named keys, each with limits of its own. `--api-key` goes before it. An empty file is no key. The \
file is read again on SIGHUP.

```sh
pipeinfer api-key alice --requests 60 >> keys.txt   # shows the key once, on stderr
kill -HUP PID                                       # of `pipeinfer serve`, or of each gateway
```

One key a line, `#` begins a comment:

```
alice sha256:2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b requests=60
bob   sha256:81b637d8fcd2c6da6359e6963113a1170de795e4b725b84d1e0b4cfd9ec58ce9 concurrent=4
```

- The name stands in metrics. It has at most 64 letters, digits and `._-`.
- After the name comes the SHA-256 of the key.
- `admin` marks an operator's key, which sees others' requests and the texts of cached prompts at \
`/monitor`.
- `concurrent`, `requests` and `tokens` are limits like the settings below. `requests` and \
`tokens` count a minute. 0 is no limit. A limit that is not given is the setting's.
- A file of one bare word is a key as it is, called `default`.
- A file has at most 1,000 keys and 1 MiB, because each request is compared with all keys.
- After SIGHUP a new key is let in. A key that is gone gets 401 from its next request on. \
Answers that have begun go on; a feed of `/monitor` ends. A name that stays keeps what it has used \
of its minute, also with another key.
- A file that is broken, missing or empty changes nothing and is one error in the log."""

TARGETS = """A step in which streams decode also computes a part of the prompts that wait. A \
longer step finishes prompts sooner, and lets every stream wait longer for its next token. Under \
the policy `mixed` the time of such a step is

```
T = max(T_spared, min(T_itl, T_ttft))
```

- `T_spared` is what streams hardly notice: up to half as long again as the decodes alone would \
take, or up to 512 tokens in all; at most 1,024 tokens. [Architecture](architecture.md) says how \
exactly.
- `T_ttft` is the shortest step with which every prompt that waits, in the order of the queue, \
would be computed within `--ttft-target` of its arrival.
- `T_itl` is `--itl-target`. A server full of long prompts makes steps of this length. So does a \
server on which a prompt is late already.

![Left: the time of a step beside 64 streams grows with its tokens, and reaches the target of 25 \
ms at about 7,500. Right: up to 50,000 prompt tokens that wait, steps take 4.5 ms; from there on \
they get longer, up to 21 ms for 190,000 and more.](images/step-targets.png)

Qwen3-0.6B on an H200 with 64 streams: on the left what a step takes, on the right the step that \
is chosen. `python tools/simulate targets` says the same of other targets, as a table.

The engine measures at its start how long steps take, and logs what the target allows. \
`pipeinfer_target_step_tokens` and `pipeinfer_target_prompt_tokens_per_second` of `/metrics` and \
`pipeinfer doctor` say the same. On a CPU nothing is measured, and `--mixed-step-tokens` limits \
steps. `LLM` has no targets, because nobody waits for single tokens of a batch."""

FURTHER = {"api_key_file": KEY_FILE, "itl_target": TARGETS}


def page() -> str:
    """docs/reference/settings.md."""
    return page_of("Settings", INTRODUCTION, *_parts())


def _parts() -> Iterator[str]:
    for group, settings in groupby(settings_help().items(), lambda item: item[1].group):
        yield f"## {group[0].upper()}{group[1:]}"
        for name, told in settings:
            yield from _setting(name, told)


def _setting(name: str, told: SettingHelp) -> Iterator[str]:
    yield f"### {name.replace('_', '-')}"
    line = told.line.partition("; default: ")[0]
    yield sentence(re.sub(r"(^|; )(\w+)(?=: )", r"\1`\2`", line))
    yield _from_here(bullets(_facts(name, told)))
    yield _from_here(told.more or FURTHER.get(name, ""))


def _from_here(text: str) -> str:
    """Links to other pages, which code has relative to docs/."""
    return re.sub(r"\]\((?!#)", "](../", text)


def _facts(name: str, told: SettingHelp) -> Iterator[str]:
    if name == "model":
        yield "Argument: `MODEL`"
    else:
        value = "" if told.kind is bool else f" {told.value or 'VALUE'}"
        yield f"Flag: `{other_servers.flag(name)}{value}`"
    if told.choices:
        yield f"Values: {codes(told.choices)}"
    default = getattr(Settings(), name)
    shown = f"`{default}`" if default or not told.unset else told.unset
    off = "off: " if told.kind is bool else ""
    yield f"Default: {off}{shown}"
    yield f"Environment: `{PREFIX}{name.upper()}`"
    yield f"Topology file and Python: `{name}`"
