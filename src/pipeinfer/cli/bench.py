"""`pipeinfer bench URL`: latency and throughput of any OpenAI-compatible server, over HTTP.

Knows the flags; measure.py beside does it, and pipeinfer/bench/ says how.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from pipeinfer.bench.dataset import (
    DEFAULT_CONCURRENCY,
    MIN_REQUESTS,
    MIN_REQUESTS_PER_STREAM,
    TokenRange,
)
from pipeinfer.command_line import CommandLine
from pipeinfer.params import JsonObject


def run_bench(arguments: Sequence[str]) -> int:
    """0; 1 if no request at all was answered; ConfigurationError for what cannot be."""
    options = bench_parser().parse_args(arguments)

    from pipeinfer.cli.measure import measure

    return measure(options, arguments)


def bench_parser() -> CommandLine:
    """The words of the command line."""
    command_line = CommandLine(
        prog="pipeinfer bench",
        description="Measures the latency and throughput of a server with OpenAI's API: pipeinfer, "
        "vLLM, SGLang, llama.cpp, Ollama and others. Several loads are measured in turn.",
        epilog="Example: pipeinfer bench http://127.0.0.1:8000 --rate 1,2,4 --html bench.html",
        essential=(
            "--concurrency",
            "--rate",
            "--requests",
            "--duration",
            "--prompt-tokens",
            "--output-tokens",
            "--prompts",
            "--model",
            "--api-key",
            "--json",
            "--html",
        ),
    )
    command_line.add_argument("url", metavar="URL", help="of the server, with or without /v1")
    _add_load(command_line.add_argument_group("load"))
    _add_prompts(command_line.add_argument_group("prompts"))
    _add_server(command_line.add_argument_group("server"))
    _add_output(command_line.add_argument_group("result"))
    return command_line


def _add_load(group: Any) -> None:
    add = group.add_argument
    help_text = f"closed loop: so many streams at a time (default: {DEFAULT_CONCURRENCY})"
    add("--concurrency", type=_list(int), default=[], metavar="N,N", help=help_text)
    help_text = "open loop: Poisson arrivals, requests a second"
    add("--rate", type=_list(float), default=[], metavar="R,R", help=help_text)
    add("--burst", action="store_true", help="open loop: all requests at once")
    help_text = "open loop: JSON lines with timestamp, input_length, output_length"
    add("--trace", type=Path, metavar="FILE", help=help_text)
    add("--speed", type=_positive(float), default=1.0, metavar="X", help="of the trace")
    help_text = (
        f"of each load (default: {MIN_REQUESTS}, at least {MIN_REQUESTS_PER_STREAM} a stream)"
    )
    add("--requests", type=_positive(int), metavar="M", help=help_text)
    help_text = "seconds in which requests of each load are begun, in the place of --requests"
    add("--duration", type=_positive(float), metavar="S", help=help_text)
    help_text = "of the client (default: as many as the load needs)"
    add("--processes", type=_positive(int), metavar="P", help=help_text)
    add("--warm-up", type=_count, default=4, metavar="N", help="requests before all (default: 4)")


def _add_prompts(group: Any) -> None:
    add = group.add_argument
    help_text = "lengths, drawn evenly (default: %(default)s)"
    add(
        "--prompt-tokens",
        type=TokenRange.parse,
        default=TokenRange(16, 256),
        metavar="LOW:HIGH",
        help=help_text,
    )
    add(
        "--output-tokens",
        type=TokenRange.parse,
        default=TokenRange(16, 128),
        metavar="LOW:HIGH",
        help=help_text,
    )
    add("--ids", action="store_true", help="prompts of token ids in the place of words")
    help_text = "of these ids (default: 255)"
    add("--highest-id", type=_positive(int), default=255, metavar="ID", help=help_text)
    help_text = "JSON lines: a text, or an object with prompt or messages, and max_tokens"
    add("--prompts", type=Path, metavar="FILE", help=help_text)
    help_text = "each prompt begins with one of K prefixes, its own tokens come on top"
    add("--shared-prefixes", type=_count, default=0, metavar="K", help=help_text)
    help_text = "of each prefix (default: 256)"
    add("--shared-tokens", type=_positive(int), default=256, metavar="N", help=help_text)
    add("--seed", type=_count, default=0, metavar="N", help="of all that is drawn (default: 0)")


def _add_server(group: Any) -> None:
    add = group.add_argument
    help_text = "default: chat"
    add("--endpoint", choices=("chat", "completions"), default="chat", help=help_text)
    add("--model", metavar="NAME", help="default: the first of /v1/models")
    add("--api-key", default="", metavar="KEY", help="stands in no result")
    add("--temperature", type=float, default=0.0, metavar="T", help="default: 0, greedy")
    help_text = "answers are as long as asked for; for servers that know the field"
    add("--ignore-eos", action="store_true", help=help_text)
    add("--extra", type=_object, default={}, metavar="JSON", help="further fields of requests")
    help_text = "seconds of an answer after which it counts as failed (default: 600)"
    add("--timeout", type=_positive(float), default=600.0, metavar="S", help=help_text)


def _add_output(group: Any) -> None:
    add = group.add_argument
    help_text = "a request is good if its first token came within (default: 1000)"
    add("--good-ttft", type=_positive(float), default=1000.0, metavar="MS", help=help_text)
    help_text = "and its mean time between tokens is up to (default: 100)"
    add("--good-itl", type=_positive(float), default=100.0, metavar="MS", help=help_text)
    add("--json", type=Path, metavar="OUT", help="write the result there")
    add("--html", type=Path, metavar="OUT", help="write a page with charts there")


def _positive(kind: type[float] | type[int]) -> Callable[[str], float]:
    def convert(text: str) -> float:
        value = kind(text)
        if not 0 < value < math.inf:
            raise argparse.ArgumentTypeError("must be above 0")
        return value

    return convert


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError("a whole number, 0 or more")
    return int(text)


def _list(kind: type[float] | type[int]) -> Callable[[str], list[float]]:
    def convert(text: str) -> list[float]:
        try:
            return [_positive(kind)(word) for word in text.split(",")]
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no list such as 1,2,4") from None

    return convert


def _object(text: str) -> JsonObject:
    try:
        return msgspec.json.decode(text, type=JsonObject)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise argparse.ArgumentTypeError(f"no JSON object: {error}") from None
