"""The page of the statistics in heartbeats, by stage; names that end in `_total` only grow.

A test compares the names with those of a running pipeline. The phases of a step, after which many
are called, stand behind them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby

from docs.markdown import bullets, sentence
from docs.markdown import page as page_of
from pipeinfer.core import histogram_names

BUCKET = "_le_"  # before the upper end of a histogram's bucket
INTRODUCTION = """Every stage says these numbers in its heartbeats. `LLM.stats()` returns the \
latest of each stage, and [metrics](metrics.md) are made of some. Names that end in `_total` only \
grow, until the process ends. [Telemetry](../telemetry.md) says what heartbeats are."""
PHASES_SAID = """The engine times its host by phase of a step. The phases are ranges on the \
timeline of nsys (NVTX), and in the trace that `--profile` writes."""

# Of an engine's step, in order: what its host does.
PHASES = {
    "plan": "applies the plan to the pages and builds the step's arrays, on the event loop",
    "pack": "on a GPU: writes rows and changes into the pinned buffer, on the launch thread",
    "upload": "on a GPU: starts the one copy to the device, on the launch thread",
    "attention_plan": "makes index arrays, masks and work lists of the attention backend, on the "
    "launch thread",
    "forward": "launches the model, or replays its graph (which samples, too), on the launch "
    "thread; on a CPU it computes here",
    "masks": "finds which ids rows with a grammar may sample, on the event loop, while the device "
    "computes the step",
    "sample": "samples, or launches that, and starts the ids' way back, on the launch thread",
    "result": "turns the ids into a result and sends it, on the event loop",
}
# Of an engine's start, in order.
START = {
    "process": "until its own modules are loaded: Python, and what all stages have",
    "imports": "importing torch, and what is built on it",
    "checks": "checking settings against the checkpoint",
    "ranks": "waiting for the other ranks",
    "weights": "building the model and reading its weights",
    "attention": "loading kernels of packages",
    "warm_up": "first steps, for which kernels are compiled or loaded",
    "pool": "measuring and allocating the KV pool",
    "graphs": "capturing CUDA graphs, before it was ready",
    "step_times": "measuring what steps take",
    "vocabulary": "waiting for the vocabulary of grammars",
}
EACH = "all stages"


def _phases() -> dict[str, str]:
    said = {f"{one}_seconds": f"seconds of the host in the phase `{one}`" for one in PHASES}
    whats = {one: f"the phase `{one}`" for one in PHASES} | {"host": "all phases of a step"}
    for kind, of in (
        ("us", "the last 1,024 steps since the engine last had nothing to do for half a second"),
        ("full_us", "full steps"),
    ):
        for which, word in (("p50", "median"), ("p99", "99th percentile")):
            for one, what in whats.items():
                said[f"{one}_{kind}_{which}"] = f"microseconds of {what}: {word} of {of}"
    return said


def _latencies(name: str, what: str, since: str) -> dict[str, str]:
    """From the buckets of a histogram; 0 where there were none."""
    said = {f"{name}_count": f"{what} in the last minute"}
    for percent in (50, 90, 99):
        said[f"{name}_ms_p{percent}"] = (
            f"milliseconds of those since {since}: {percent}th percentile, 0 where there were none"
        )
    return said


def _histogram(name: str, what: str) -> dict[str, str]:
    """Of seconds, by buckets."""
    *buckets, count, total = histogram_names(name)
    said = {one: f"of those, within {one.rpartition('_')[2]} s" for one in buckets}
    return {count: what, total: "seconds of those, all together", **said}


# {stage: {statistic: what it counts or says}}
STATISTICS: dict[str, dict[str, str]] = {
    EACH: {
        "bad_frames": "frames dropped: they could not be read, or named a stage that there is not",
        "unsent_total": "messages that the stage could not send: nested too deeply, too large, or "
        "for a stage that there is not; their requests fail with 500",
        "uptime_seconds": "seconds since this process began",
        "fenced": "frames dropped because a newer process had taken over their sender's stage",
        "repeated_frames_total": "frames sent once more because a connection had broken",
        "refused_handshakes_total": "connections of peers that have no right key",
        "recordings": "recordings that run",
        "recorded_bytes_total": "bytes of recordings that have ended",
        "recorded_lost_total": "messages that could not be recorded in time",
        "flight_bytes": "bytes in the flight recorder",
    },
    "gateway": {
        "running": "requests with output",
        "waiting": "requests without output so far",
        "waiting_tokens": "prompt tokens of those, as `--max-queue-tokens` counts them",
        "requests_total": "requests sent on, a choice each",
        "output_tokens_total": "output tokens delivered",
        **_latencies("ttft", "first outputs", "the request came"),
        **_latencies("itl", "later outputs", "the output before"),
        "late_rows": "rows of text for requests that had ended",
        "stray_rows": "rows of text for requests that this gateway never had",
        "resubmitted": "live requests told to a tokenizer that was restarted",
        "diverged": "requests whose tokens were computed again and came out different; they go on "
        "with those that their clients have",
    },
    "tokenizer": {
        "accepted_total": "requests passed on",
        "refused_total": "requests refused",
        "abandoned_total": "requests that ended before their prompt was encoded",
        "trials_ended_total": "trials of grammars that were ended, or died",
        "encoded_total": "requests of `/tokenize` and `/detokenize` that were answered",
        "prompt_tokens_total": "tokens of accepted prompts",
        "ledger": "unfinished requests, remembered with their group",
        "encoding": "requests whose long prompts are encoded, or whose grammars are tried, beside "
        "the stage, and those that wait for it",
        "moved_total": "requests handed to another group because theirs had lost its engine",
        "groups_up": "groups that get new requests: heard in the last 3 seconds, and ready",
    },
    "scheduler": {
        "running": "requests in slots",
        "waiting": "live requests without a slot",
        "held": "of those, choices that wait until another has computed their prompt",
        "preparing": "of those, requests whose grammar the engines are compiling",
        "kept": "finished requests whose clients may not have everything",
        "orphans": "requests known from their output alone, after a restart",
        "in_flight": "steps without a result",
        "plans_total": "plans published",
        "planned_tokens_total": "tokens that those plans should compute",
        "jumped_tokens_total": "output tokens that grammars forced, computed in the row of the one "
        "before",
        "preemptions_total": "requests taken back for memory",
        "deferred_total": "rows that the engine had no pages for",
        "epochs_total": "epochs begun",
        "tokens_left": "tokens that all live requests still have to compute if they grow to their "
        "`max_tokens` (256 where none is given); routing weighs groups by it",
        "agreed_plans": "plans of this epoch of which all ranks are known to have decided alike; "
        "0 with one rank",
        "accepted_total": "requests that came; each is among those above, or among the next seven",
        "finished_total": "requests ended by token or length",
        "stopped_total": "requests ended by the detokenizer, mostly for a stop string",
        "timed_out_total": "requests ended by their timeout, where the gateway did not say "
        "so first",
        "failed_total": "requests ended by an error",
        "aborted_total": "requests that nobody wanted any more",
        "refused_total": "requests that never could run",
        "handed_over_total": "requests that another group took over",
        "bad_logits_total": "requests that failed because their logits were not finite",
        "target_step_tokens": "tokens of the longest step within `--itl-target` beside 64 streams "
        "of 1,000 tokens; 0 where step times are not known, or none is within it",
        "target_prompt_rate": "prompt tokens a second by such steps",
        **_histogram("queue", "requests that got a slot for the first time, since they came"),
        **_histogram("prefill", "requests that got their first output, since they got a slot"),
    },
    "engine": {
        "pages_total": "KV pages",
        "pages_free": "KV pages that are free",
        "pages_evictable": "KV pages that are cached and not in use",
        "pages_evicted": "cached pages given up for others since the epoch began",
        "page_tokens": "tokens of a page",
        "kv_fp8": "1 if pages hold keys and values in 8 bits, else 0",
        "slots_total": "places for requests",
        "slots_used": "places that are taken",
        "steps_in_flight": "plans applied whose result is not sent",
        "plans_total": "plans applied",
        "plans_dropped_total": "plans dropped because they were of another epoch",
        "steps_total": "steps given to the device",
        "rows_total": "rows of plans",
        "rows_deferred_total": "rows without pages",
        "prompt_tokens_total": "tokens of admitted prompts",
        "cached_tokens_total": "how many of those were cached",
        "computed_tokens_total": "tokens that went through the model",
        "sampled_tokens_total": "tokens that came out of the model",
        "bad_rows_total": "rows whose logits were not finite: NaN, infinity, or nothing left to "
        "sample; their requests fail by themselves",
        "refused_rows_total": "rows whose grammar allowed nothing, or tripped one of its limits; "
        "their requests fail by themselves",
        "faults_total": "epochs that this rank ended",
        "busy_seconds": "seconds in which a step ran",
        "idle_seconds": "seconds between steps with none queued",
        **_phases(),
        "full_rows": "rows of the largest step that only decodes",
        "full_steps": "full steps: those that only decode and have at least 7/8 of those rows",
        **{f"start_{one}_seconds": f"seconds of the start: {what}" for one, what in START.items()},
        "start_seconds": "seconds of the start, all together",
        "graphs": "CUDA graphs",
        "graphs_left": "CUDA graphs that are captured when there is no step",
    },
    "detokenizer": {
        "running": "requests that go on",
        "kept": "requests that ended and whose clients may not have everything",
        "opened_total": "requests that came",
        "finished_total": "requests that ended with their last row, by a stop string or a failure, "
        "too",
        "aborted_total": "requests that ended without a last row",
        "tokens_total": "output tokens read",
        "stop_hits_total": "requests ended by a stop string",
        "late_rows_total": "rows for requests that are over, and of schedulers that have not "
        "answered a new detokenizer yet",
        "failed_total": "requests whose output could not be decoded",
        "diverged_total": "requests that two groups ran with different tokens; they go on with "
        "those that their clients have",
    },
}


def page() -> str:
    """docs/reference/statistics.md."""
    return page_of(
        "Statistics",
        INTRODUCTION,
        *_stages(),
        "## Phases of a step",
        PHASES_SAID,
        bullets(f"`{name}`: {sentence(said)}" for name, said in PHASES.items()),
    )


def _stages() -> Iterator[str]:
    for stage, statistics in STATISTICS.items():
        yield f"## {stage[0].upper()}{stage[1:]}"
        yield bullets(_lines(statistics))


def _lines(statistics: Mapping[str, str]) -> Iterator[str]:
    """The buckets of a histogram stand in one line."""
    for _, named in groupby(statistics, lambda name: name.partition(BUCKET)[0]):
        names = list(named)
        first, last = names[0], names[-1]
        if first != last:
            buckets = f"`{first}` to `{last}`, {len(names)} in all"
            yield f"{buckets}: how many of those took at most so many seconds."
        else:
            yield f"`{first}`: {sentence(statistics[first])}"
