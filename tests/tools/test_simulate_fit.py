"""A step-time model: found from steps, read from recordings of an engine, and kept in a file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from simulated_clusters import tallied

from pipeinfer import LLM, SamplingParams
from pipeinfer.messages import TokenizedRequest
from pipeinfer.replay.traces import LoadedTrace
from pipeinfer.settings import ConfigurationError, Settings
from pipeinfer.step_cost import StepCost, Targets
from pipeinfer.trace.format import TraceHeader
from pipeinfer.wire import unpack
from simulate import TOOL, fit, recordings, step_model
from simulate.cluster import Deployment
from simulate.recordings import MeasuredStep
from simulate.step_model import StepModel, attended
from simulate.workloads import Arrival

OUTPUT = 60  # tokens of each recorded request
TRUE = StepModel(
    fixed=2e-3, mixed=5e-4, decode=((0, 1e-5), (64, 4e-5)), prefill=((0, 2e-5),), context=3e-8,
    pair=2e-9,
)  # fmt: skip


def measured_steps(count: int, noise: float, seed: int = 0) -> list[MeasuredStep]:
    source = np.random.default_rng(seed)
    steps = []
    for _ in range(count):
        decodes, tokens = int(source.integers(0, 200)), int(source.integers(0, 1500))
        tokens *= int(source.integers(0, 2))
        contexts, pairs = decodes * int(source.integers(1, 900)), tokens * 300
        seconds = TRUE.seconds(decodes, contexts, tokens, pairs) * (1 + noise * source.normal())
        steps.append(MeasuredStep(decodes, contexts, tokens, pairs, seconds))
    return steps


def test_fit_finds_the_model_that_made_the_steps():
    found = fit.fit(measured_steps(600, noise=0.0))
    others = measured_steps(200, noise=0.0, seed=1)
    said = fit.predicted(found, others)
    assert said == pytest.approx([step.seconds for step in others], rel=1e-6)


def test_fit_keeps_the_sum_of_noisy_steps():
    steps = measured_steps(3000, noise=0.1)
    found = fit.fit(steps)
    assert fit.predicted(found, steps).sum() == pytest.approx(sum(s.seconds for s in steps))


def test_coefficients_are_never_negative():
    """Steps that get shorter with their contexts, as noise may have it."""
    source = np.random.default_rng(2)
    contexts = source.integers(0, 1000, 200)
    steps = [MeasuredStep(1, int(c), 0, 0, 2e-3 - 1e-6 * int(c)) for c in contexts]
    found = fit.fit(steps)
    assert found.context == 0.0
    matrix = source.normal(size=(50, 6))
    assert (fit.nonnegative(matrix, source.normal(size=50)) >= 0).all()


def test_nonnegative_is_the_plain_solution_where_that_is_positive():
    source = np.random.default_rng(3)
    matrix, wanted = source.random((40, 5)), np.array([3.0, 0.5, 1e-3, 7.0, 2.0])
    assert fit.nonnegative(matrix, matrix @ wanted) == pytest.approx(wanted)


def test_attended_counts_each_query_with_all_up_to_itself():
    assert attended([0], [3]) == 1 + 2 + 3
    assert attended([5, 0], [2, 1]) == (6 + 7) + 1


def test_a_model_survives_its_file_and_other_files_are_refused(tmp_path):
    path = tmp_path / "model.json"
    step_model.save(path, TRUE)
    assert step_model.load(str(path)) == TRUE
    for text, reason in (("{", "is no step model"), ('{"fixed": 1, "schema": "x"}', "schema")):
        path.write_text(text)
        with pytest.raises(ConfigurationError, match=reason):
            step_model.load(str(path))
    with pytest.raises(ConfigurationError, match="cannot read"):
        step_model.load(str(tmp_path / "none.json"))


def test_shipped_models_can_be_loaded_and_simulated():
    names = [path.stem for path in step_model.SHIPPED.glob("*.json")]
    assert "demo-cpu" in names
    for name in names:
        model = step_model.load(name)
        assert model.seconds(4, 400) > 0 and model.noise.scatter and model.outbound
        arriving = [Arrival(n, 0.0, np.full(300, n, np.int32), 50) for n in range(32)]
        tally = tallied(Deployment(), arriving, model=model)
        assert tally.groups[0].output == 32 * 50
        # At least its decodes one after the other, and not ten times what all steps should take.
        assert 49 * model.seconds(1, 300) / 3 < tally.last < 10 * 110 * model.seconds(32, 32 * 350)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Path:
    """Recordings of the demo model: 24 requests of known lengths."""
    folder = tmp_path_factory.mktemp("recorded")
    prompts = [[7 + n % 200] * (20 + n) for n in range(24)]
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True)
    with LLM(record=str(folder), threads=1, log_level="error") as llm:
        llm.generate(prompts, params, use_tqdm=False)
    return folder


def test_recorded_steps_hold_every_computed_token(recorded):
    (engine,) = (r for r in recordings.recordings(recorded) if r.identity.name == "engine")
    steps = list(recordings.steps(engine))
    computed = sum(step.decodes + step.tokens for step in steps)
    cached = sum(
        int(np.frombuffer(e.message.cached, "<i4").sum())
        for e in engine.entries
        if e.kind == "Admitted"
    )
    # All prompts, and all outputs but the last of each request.
    assert computed + cached == sum(20 + n for n in range(24)) + 24 * (OUTPUT - 1)
    assert all(step.seconds > 0 for step in steps)
    assert sum(step.seconds for step in steps) <= engine.seconds


def test_fit_command_makes_a_model_of_a_recording(recorded, tmp_path, capsys):
    out = tmp_path / "model.json"
    assert TOOL.main(["fit", str(recorded), "--out", str(out), "--skip", "2"]) == 0
    assert "steps of" in capsys.readouterr().out
    model = step_model.load(str(out))
    assert model.noise.scatter[0].above == model.noise.mixed[0].above == 0
    assert all(len(one.factors) == fit.QUANTILES for one in model.noise.scatter)
    for times in (model.turnaround, model.inbound):
        assert times == tuple(sorted(times)) and 0 < times[0] < times[-1] < 10
    # On a busy machine all of it may be told as what each row takes.
    assert model.outbound == tuple(sorted(model.outbound)) and model.outbound[0] >= 0
    assert 0 < model.outbound[-1] + model.outbound_row < 10
    assert 0 <= model.bubble[0] <= model.bubble[-1] < 10
    assert 0 < model.seconds(8, 400) < 10


def test_delays_are_those_of_every_request_and_step(recorded):
    found = recordings.recordings(recorded)
    (engine,) = (one for one in found if recordings.leads(one))
    assert len(recordings.inbound(found)) == 24
    steps = len(list(recordings.steps(engine)))
    # Text of a step that waits for that of the one before is left out: more on a busy machine.
    assert 0.1 * steps < len(recordings.outbound(found)) <= steps
    for waits in (recordings.turnaround(engine), recordings.bubble(engine)):
        assert 0.5 * steps < len(waits) <= steps  # without the first, and those after empty plans
    assert min(recordings.turnaround(engine)) > 0
    assert sum(recordings.bubble(engine)) < sum(recordings.turnaround(engine))


def test_what_each_row_of_a_message_takes_is_told_from_what_all_take():
    source = np.random.default_rng(0)
    rows = source.integers(1, 256, 500)
    rest = source.uniform(1e-3, 2e-3, 500)
    rate, found = fit.by_row([list(zip(rows, rest + 1e-5 * rows, strict=True))])
    assert rate == pytest.approx(1e-5, rel=0.05)
    assert found == pytest.approx(np.linspace(1e-3, 2e-3, len(found)), abs=1e-4)
    assert fit.by_row([]) == (0.0, ())


def test_a_recording_is_compared_with_its_simulation(recorded, tmp_path, tool_run):
    """Same machine, same requests: counts are equal, and times as near as 60 steps can be."""
    model = str(tmp_path / "model.json")
    assert TOOL.main(["fit", str(recorded), "--out", model, "--skip", "0"]) == 0
    done = tool_run("simulate", "against", str(recorded), "--model", model)
    assert done.code == 0, done.err
    result = done.metrics
    real, said = result["measured"], result["simulated"]
    assert (real["requests"], real["output_tokens"]) == (24, 24 * OUTPUT)
    assert (said["requests"], said["output_tokens"]) == (24, 24 * OUTPUT)
    assert said["steps"] == pytest.approx(real["steps"], abs=12)
    assert result["ratio"]["tokens_per_s"] == pytest.approx(1.0, abs=0.4)
    assert result["ratio"]["e2e_ms"]["p50"] == pytest.approx(1.0, abs=0.4)
    assert real["ttft_ms"]["p50"] < real["e2e_ms"]["p50"] and real["itl_ms"]["p50"] > 0
    assert "itl_ms p99" in done.out


def test_a_simulation_of_the_recorded_requests_takes_as_many_steps_and_as_long(recorded):
    found = recordings.recordings(recorded)
    steps = [step for one in found if recordings.leads(one) for step in recordings.steps(one)]
    model = fit.fit(steps)
    # When they came to the scheduler: on a busy machine hardly at the same moment.
    works = [
        e for e in recordings.entries(found, "scheduler") if isinstance(e.message, TokenizedRequest)
    ]
    arriving = [
        Arrival(n, work.time - works[0].time, unpack(work.message.prompt_ids), OUTPUT)
        for n, work in enumerate(works)
    ]
    assert len(arriving) == 24
    tally = tallied(Deployment(max_model_len=2048), arriving, model=model)
    assert tally.groups[0].steps == pytest.approx(len(steps), abs=12)
    assert tally.last == pytest.approx(sum(step.seconds for step in steps), rel=0.25)


def test_a_batch_was_recorded_without_targets_for_its_steps(recorded):
    group, _, _ = recordings.deployment(recordings.recordings(recorded))
    assert (group.itl_target, group.ttft_target) == (0.0, 0.0)
    usual = Settings()
    assert (usual.itl_target, usual.ttft_target) == (0.025, 0.5), "a server has them"


def test_fit_without_recordings_says_so(tmp_path, capsys):
    assert TOOL.main(["fit", str(tmp_path), "--out", str(tmp_path / "x.json")]) == 2
    assert "holds no recording of an engine" in capsys.readouterr().err


def recording_of(name: str, settings: dict, facts: dict) -> LoadedTrace:
    header = TraceHeader(
        protocol=1, version="0", stage=f"{name}-0", name=name, settings=settings, facts=facts
    )
    return LoadedTrace(Path("none"), header, [])


def test_a_deployment_has_the_budgets_that_a_gpu_engine_measured():
    """As an engine with graphs of mixed steps records it; what a user set comes first."""
    facts = {
        "pages": 1001, "page_size": 64, "max_slots": 256, "max_model_len": 4096,
        "step_tokens": 8192, "graph_sizes": [1, 2, 4],
        "step_cost": [[[1, 900], [64, 1000]], [[128, 1500, 7], [256, 2000, 8]], 3],
    }  # fmt: skip
    settings = {
        "max_running": 300, "max_step_tokens": 0, "mixed_step_tokens": 0, "policy": "mixed",
        "overlap_depth": 2, "cache": "radix", "dp": 3, "routing": "prefix",
    }  # fmt: skip
    engine = recording_of("engine", {}, facts)
    group, groups, routing = recordings.deployment(
        [recording_of("scheduler", settings, {}), engine]
    )
    assert (groups, routing) == (3, "prefix")
    assert (group.kv_pages, group.page_size, group.max_running) == (1000, 64, 256)
    assert (group.max_step_tokens, group.mixed_step_tokens) == (8192, 0)
    cost = StepCost(((1, 900), (64, 1000)), ((128, 1500, 7), (256, 2000, 8)), 3)
    assert group.step_cost == group.hello.step_cost == cost
    assert group.ttft_target == 0.0, "recorded before there were targets"
    chosen = settings | {
        "max_step_tokens": 4096, "mixed_step_tokens": 100, "itl_target": 0.01, "ttft_target": 0.2,
    }  # fmt: skip
    group, _, _ = recordings.deployment([recording_of("scheduler", chosen, {}), engine])
    assert (group.max_step_tokens, group.mixed_step_tokens) == (4096, 100)
    assert group.options.targets == Targets(0.01, 0.2)
    with pytest.raises(ConfigurationError, match="no recording of a scheduler"):
        recordings.deployment([engine])
