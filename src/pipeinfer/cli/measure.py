"""The command `pipeinfer bench`: measures each load in turn, prints and writes the results.

Knows what to print; what is measured, and how, is in pipeinfer/bench/.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import signal
import sys
from collections.abc import Callable, Sequence

import msgspec

from pipeinfer.bench import client, report, runner
from pipeinfer.bench.client import Endpoint, GoodputTarget, ServerNotUsable
from pipeinfer.bench.dataset import (
    DEFAULT_CONCURRENCY,
    CustomDataset,
    RandomDataset,
    load_custom_dataset,
)
from pipeinfer.bench.runner import (
    Benchmark,
    LoadLimits,
    LoadPoint,
    PointResult,
    WorkerDied,
    load_trace,
)
from pipeinfer.command_line import counted
from pipeinfer.settings import ConfigurationError, base_url

SEED_STEP = 1_000_003  # added to the seed for each further point
SECRET_FLAG = "--api-key"  # its value goes into no file


def measure(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """`options`, as `arguments` say them. 0; 1 if no request at all was answered;
    ConfigurationError for what cannot be."""
    points = _points(options)
    for path in (options.json, options.html):
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigurationError(f"{path}: there is no such folder")
    try:
        bench, settings = asyncio.run(_prepared(options))
        print("  ".join(f"{name}: {value}" for name, value in settings.items()), flush=True)
        results, whole = _measure_all(bench, points)
    except (ServerNotUsable, WorkerDied) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if len(results) > 1:
        print("\n" + report.overview_text(results))
    if results:
        _write(options, _command(arguments), settings, results, bench.target)
    answered = any(result.metrics["failed"] < result.metrics["requests"] for result in results)
    return 0 if answered and whole else 1


def _measure_all(bench: Benchmark, points: Sequence[LoadPoint]) -> tuple[list[PointResult], bool]:
    """The results, and whether of all points: Ctrl-C and SIGTERM end the point under way, whose
    workers and files go before this returns, and leave out the rest."""
    results: list[PointResult] = []
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for number, point in enumerate(points):
            results.append(_measured(bench, number, point))
    except KeyboardInterrupt:
        of_all = counted(len(points), "load")
        print(f"\npartial: {len(results)} of {of_all} measured to the end", flush=True)
        return results, False
    finally:
        signal.signal(signal.SIGTERM, before)
    return results, True


def _measured(bench: Benchmark, number: int, point: LoadPoint) -> PointResult:
    line = report.ProgressLine(point.label, point.requests, sys.stderr)
    try:
        result = bench.run_point(number, point, line.show)
    except KeyboardInterrupt:
        print(f"\nended early: {line.counts() or point.label}", flush=True)
        raise
    finally:
        line.end()
    print("\n" + report.point_text(result, bench.target), flush=True)
    return result


def _write(
    options: argparse.Namespace,
    command: str,
    settings: dict[str, str],
    results: Sequence[PointResult],
    target: GoodputTarget,
) -> None:
    if options.json is not None:
        last = results[-1].metrics
        metrics = {
            "tokens_per_s": last["tokens_per_s"],
            "ttft_ms": last["ttft_ms"],
            "itl_ms": last["itl_ms"],
            "e2e_ms": last["e2e_ms"],
            "targets_ms": {"ttft": target.ttft * 1e3, "itl": target.tpot * 1e3},
            "settings": settings,
            "points": [one.to_json() for one in results],
        }
        report.write_result(options.json, command, metrics)
    if options.html is not None:
        title = f"{settings['model']} at {settings['server']}"
        options.html.write_text(
            report.html_page(title, {**settings, "command": command}, results, target)
        )
        print(f"\n{options.html} is the page of it")


def _command(arguments: Sequence[str]) -> str:
    """The command line as it was called, without the key."""
    words = list(arguments)
    for index, word in enumerate(words):
        if word == SECRET_FLAG and index + 1 < len(words):
            words[index + 1] = "..."
        elif word.startswith(f"{SECRET_FLAG}="):
            words[index] = f"{SECRET_FLAG}=..."
    return shlex.join(["pipeinfer", "bench", *words])


def _points(options: argparse.Namespace) -> list[LoadPoint]:
    """In the order of the help; a default if nothing is asked for."""
    bounds = LoadLimits(options.requests, options.duration)
    if options.duration is not None and (options.burst or options.trace):
        raise ConfigurationError("--duration bounds neither --burst nor --trace; --requests does")
    if options.duration is not None and options.requests is not None:
        raise ConfigurationError("--requests and --duration exclude each other")
    found = [runner.closed_loop_point(streams, bounds) for streams in options.concurrency]
    found += [runner.poisson_point(rate, bounds, options.seed) for rate in options.rate]
    found += [runner.burst_point(bounds)] if options.burst else []
    if options.trace:
        trace = load_trace(options.trace)
        found.append(runner.trace_point(trace[: options.requests], options.speed))
    return found or [runner.closed_loop_point(DEFAULT_CONCURRENCY, bounds)]


async def _prepared(options: argparse.Namespace) -> tuple[Benchmark, dict[str, str]]:
    """The benchmark that is the same at all points, and its settings by name; the server is warm
    then."""
    endpoint = Endpoint(
        url=base_url(options.url),
        chat=options.endpoint == "chat",
        model=options.model,
        api_key=options.api_key,
        temperature=options.temperature,
        ignore_eos=options.ignore_eos,
        exact_length=False,
        timeout=options.timeout,
        extra_body=options.extra,
    )
    if endpoint.chat and options.ids:
        raise ConfigurationError("token ids need --endpoint completions")
    drawn = _drawn(options)
    custom = None
    if options.prompts is not None:
        seed, chat = options.seed, endpoint.chat
        custom = load_custom_dataset(options.prompts, options.output_tokens, seed, chat)
    if endpoint.model is None:
        model = await client.first_model(endpoint)
        endpoint = msgspec.structs.replace(endpoint, model=model)
    endpoint = await client.drop_refused_fields(endpoint)
    unit = "tokens, as words"
    if custom is None:
        drawn, counted = await client.calibrate_words(endpoint, drawn)
        unit = unit if counted else "words"
    if options.warm_up:
        timings = await client.warm_up(endpoint, custom or drawn, options.warm_up)
        if not any(line.success for line in timings):
            failed = f"all {len(timings)} requests of the warm-up failed"
            text = f"{failed}, the first by {timings[0].failure_kind}: {timings[0].error}"
            raise ServerNotUsable(f"{endpoint.api_url}: {text}")
    target = GoodputTarget(options.good_ttft / 1e3, options.good_itl / 1e3)
    bench = Benchmark(endpoint, _source(drawn, custom), target, _processes(options))
    return bench, _settings(options, endpoint, unit)


def _drawn(options: argparse.Namespace) -> RandomDataset:
    lengths: list[tuple[int, int]] = []
    if options.trace:
        found = load_trace(options.trace)
        lengths = [(entry.input_length, entry.output_length) for entry in found]
    return RandomDataset(
        prompt_len=options.prompt_tokens,
        output_len=options.output_tokens,
        seed=options.seed,
        highest_id=options.highest_id if options.ids else None,
        num_prefixes=options.shared_prefixes,
        prefix_len=options.shared_tokens,
        lengths=lengths,
    )


def _source(
    drawn: RandomDataset, custom: CustomDataset | None
) -> Callable[[int], RandomDataset | CustomDataset]:
    """The prompts of each point, none of which was in one before."""
    if custom is not None:
        return lambda number: custom
    return lambda number: msgspec.structs.replace(drawn, seed=drawn.seed + SEED_STEP * number)


def _processes(options: argparse.Namespace) -> Callable[[LoadPoint], int]:
    if options.processes is not None:
        return lambda point: options.processes
    return lambda point: point.processes(report.cores())


def _settings(options: argparse.Namespace, endpoint: Endpoint, counted: str) -> dict[str, str]:
    """Settings of the whole run, by name; without the key."""
    shown = {
        "server": endpoint.url,
        "model": str(endpoint.model),
        "endpoint": options.endpoint,
    }
    if options.prompts is not None:
        shown["prompts"] = f"{options.prompts.name}"
    elif options.trace is not None:
        shown["prompts"] = f"lengths of {options.trace.name}"
    else:
        kind = f"random ids up to {options.highest_id}" if options.ids else counted
        shown["prompts"] = f"{options.prompt_tokens} {kind}"
    if options.shared_prefixes:
        shown["behind"] = f"one of {options.shared_prefixes} prefixes of {options.shared_tokens}"
    shown["output"] = f"{options.output_tokens} tokens"
    shown["ends"] = "ignored" if endpoint.ignore_eos else "as the model likes"
    shown["temperature"] = f"{endpoint.temperature:g}"
    return shown | {"seed": str(options.seed)}
