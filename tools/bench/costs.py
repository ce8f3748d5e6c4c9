"""`costs`: what log-probs and schemas cost, in turns with the same requests without them.

One server does all of it, so whatever else the machine does hits all kinds alike. Knows what to
measure; how requests ask for it stands in the parameters of sampling.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from bench import offline, shapes, workload
from bench.workload import Work
from pipeinfer import LLM, SamplingParams
from pipeinfer.bench.options import TokenRange
from pipeinfer.params import MOST_BIASES, StructuredOutputs

# So often strings end, in tokens, about: random weights would hardly ever end one.
STRING = 10
# None of them is complete before so many items: no stream ends before it has its tokens.
MANY = 1000


def _list_of(properties: Mapping[str, Any]) -> StructuredOutputs:
    item = {
        "type": "object",
        "properties": dict(properties),
        "required": list(properties),
        "additionalProperties": False,
    }
    return StructuredOutputs(json=json.dumps({"type": "array", "items": item, "minItems": MANY}))


def _person(**text: int) -> StructuredOutputs:
    return _list_of(
        {
            "name": {"type": "string", **text},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "kind": {"enum": ["person", "company", "unknown"]},
            "tags": {"type": "array", "items": {"type": "string", **text}, "maxItems": 3},
            "active": {"type": "boolean"},
        }
    )


SCHEMA = _person()
# Near the end of a string, what is allowed depends on how long each token is: all are looked at.
BOUNDED = _person(maxLength=24)
LONG_KEYS = _list_of(
    {
        "the full name of the customer as it is written in the contract": {"type": "boolean"},
        "whether the customer has agreed to receive letters and messages": {"type": "boolean"},
        "the number of open invoices at the end of the previous quarter": {
            "type": "integer",
            "minimum": 0,
            "maximum": 99,
        },
    }
)

Wish = Callable[[int, dict[str, Any]], SamplingParams]  # of stream i, with what all streams ask for


def _all(**wish: Any) -> Wish:
    return lambda _, common: SamplingParams(**common, **wish)


def _every_other(**wish: Any) -> Wish:
    return lambda i, common: SamplingParams(**common, **wish if i % 2 else {})


# By name: how many times --streams, what they ask for, and with what they are compared.
KINDS: dict[str, tuple[int, Wish, str]] = {
    "free": (1, _all(), "free"),
    "logprobs": (1, _all(logprobs=5), "free"),
    "schema": (1, _all(structured_outputs=SCHEMA), "free"),
    "bounded": (1, _all(structured_outputs=BOUNDED), "free"),
    "long-keys": (1, _all(structured_outputs=LONG_KEYS), "free"),
    "twice": (2, _all(), "twice"),
    "beside": (2, _every_other(structured_outputs=SCHEMA), "twice"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this command; MODEL is a setting."""
    add = parser.add_argument
    add("--config", metavar="SHAPE", help=f"random weights: {', '.join(shapes.SHAPES)} or a file")
    said = "tokenizer.json for it, of a real model: what a mask costs depends on the vocabulary"
    add("--tokenizer", type=Path, metavar="FILE", help=said)
    add("--streams", type=int, default=64)
    add("--prompt-tokens", type=int, default=128)
    add("--output-tokens", type=int, default=256)
    add("--rounds", type=int, default=3, help="of all kinds, in changing order")
    add("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))


def run(options: argparse.Namespace, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics; prints them too."""
    kinds = list(dict.fromkeys([KINDS[kind][2] for kind in options.kinds] + options.kinds))
    with tempfile.TemporaryDirectory(prefix="pipeinfer-bench-") as temporary:
        chosen = dict(settings)
        if options.config:
            chosen |= {"model": str(_folder(Path(temporary), options))}
            chosen.setdefault("load_format", "dummy")
        return _measured(options, chosen, kinds)


def _folder(folder: Path, options: argparse.Namespace) -> Path:
    """Of random weights, with an id that ends what has a grammar."""
    shapes.write_folder(folder, {"eos_token_id": 1, **shapes.shape(options.config)})
    if options.tokenizer is not None:
        (folder / "tokenizer.json").write_bytes(options.tokenizer.read_bytes())
    return folder


def quotes(tokenizer: Path) -> dict[int, float]:
    """A bias for tokens that end a string, so that one of STRING tokens in it does; all kinds have
    it. Nothing without a tokenizer."""
    if not tokenizer.exists():
        return {}
    vocabulary = Tokenizer.from_file(str(tokenizer)).get_vocab()
    ends = sorted(token for text, token in vocabulary.items() if '"' in text)[:MOST_BIASES]
    return dict.fromkeys(ends, math.log(len(vocabulary) / len(ends) / (STRING - 1)))


def _measured(
    options: argparse.Namespace, settings: dict[str, Any], kinds: Sequence[str]
) -> dict[str, Any]:
    highest, prompt = offline.highest_id(settings), TokenRange.parse(str(options.prompt_tokens))
    rounds: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    bias = quotes(options.tokenizer or Path(str(settings.get("model", ""))) / "tokenizer.json")
    with LLM(**settings) as llm:
        for number in range(-1, options.rounds):  # the first is to warm up
            turned = number % len(kinds)
            for kind in [*kinds[turned:], *kinds[:turned]]:
                tokens = options.output_tokens if number >= 0 else 8
                count = KINDS[kind][0] * options.streams
                seed = (number + 1) * len(kinds) + list(kinds).index(kind)  # never asked before
                span = TokenRange(tokens, tokens)
                work = workload.uniform(count, prompt, span, highest, seed)
                numbers = _one(llm, work, KINDS[kind][1], bias)
                if number >= 0:
                    rounds[kind].append(numbers)
    metrics = {kind: summary(kind, rounds) for kind in kinds}
    show(metrics)
    return {"kinds": metrics, "rounds": rounds}


def _one(llm: LLM, work: Work, wish: Wish, bias: dict[int, float]) -> dict[str, float]:
    """Seconds of all streams; and of the even ones, which ask for nothing where others do, the
    mean time of a token after the first. RuntimeError if one has not the tokens that it wanted."""
    common = {"temperature": 1.0, "ignore_eos": True, "logit_bias": bias}
    params = [
        wish(i, common | {"max_tokens": tokens, "seed": i}) for i, tokens in enumerate(work.outputs)
    ]
    results = llm.generate(work.prompts, params, use_tqdm=False)
    begun = min(one.metrics.arrival_time for one in results)
    ended, waits = begun, []
    for number, (one, wanted) in enumerate(zip(results, work.outputs, strict=True)):
        (output,) = one.outputs
        times = one.metrics
        if len(output.token_ids) != wanted:
            raise RuntimeError(f"{len(output.token_ids)} of {wanted} tokens: {output.error}")
        assert times.first_token_time is not None and times.last_token_time is not None
        ended = max(ended, times.last_token_time)
        if number % 2 == 0:
            waits.append((times.last_token_time - times.first_token_time) / max(wanted - 1, 1))
    seconds = ended - begun
    return {
        "seconds": seconds,
        "tokens_per_s": work.output_tokens / seconds,
        "tpot_ms": 1e3 * statistics.mean(waits),
    }


def summary(kind: str, rounds: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, Any]:
    """Medians of the rounds, and of each round's relation to what `kind` is compared with."""
    base = rounds[KINDS[kind][2]]

    def relation(name: str) -> float:
        pairs = zip(rounds[kind], base, strict=True)
        return statistics.median(ours[name] / theirs[name] for ours, theirs in pairs)

    return {
        "compared_with": KINDS[kind][2],
        "tokens_per_s": statistics.median(one["tokens_per_s"] for one in rounds[kind]),
        "tpot_ms": statistics.median(one["tpot_ms"] for one in rounds[kind]),
        "throughput": relation("tokens_per_s"),
        "tpot": relation("tpot_ms"),
    }


def show(metrics: Mapping[str, Mapping[str, Any]]) -> None:
    """Prints the summary."""
    print(f"{'':12}{'tokens/s':>12}{'':>8}{'TPOT ms':>12}{'':>8}")
    for kind, one in metrics.items():
        print(
            f"{kind:12}{one['tokens_per_s']:12.1f}{one['throughput']:8.3f}"
            f"{one['tpot_ms']:12.3f}{one['tpot']:8.3f}"
        )
