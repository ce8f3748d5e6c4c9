"""pipeinfer computes what transformers computes: logits, greedy tokens and log-probs in float32.

Architectures whose attention differs meet every workload, page size, cache and overlap depth, and
every pair of those values occurs at least once; what else differs between architectures shows in
one workload, whose prompts are cut and stand beside each other. Log-probs are asked for in all of
these runs.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np
import pytest
import torch
from allpairspy import AllPairs
from cores import Cores
from transformers import RepetitionPenaltyLogitsProcessor

from checkpoints import ALL_ARCHITECTURES, VOCAB_SIZE, CheckpointCache, load_reference
from pipeinfer.params import RequestParams
from pipeinfer.settings import Settings
from right_logprobs import TOLERANCE, check_logprobs, check_prompt_logprobs

OUTPUTS = 26  # more than a window, and over the end of a page of any size here
GAP = 1e-3  # between the two best logits, so that rounding cannot change the greedy choice
# Alternatives of outputs and of the prompt, of whoever comes: beside each other in one step.
ASKED = ((5, 3), (0, None), (None, None), (20, 20), (None, 0), (1, None))
WORKLOADS = ("one", "mixed", "shared", "chunks", "preempted")
OVERRIDES = {
    "LlamaForCausalLM": {
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 128,
        },
        "num_key_value_heads": 4,
    },
    "MistralForCausalLM": {"sliding_window": 24},
    "Qwen2ForCausalLM": {"num_key_value_heads": 1},
    "Qwen3ForCausalLM": {"tie_word_embeddings": True},
    "Qwen3MoeForCausalLM": {},
    "Glm4ForCausalLM": {"num_key_value_heads": 1, "tie_word_embeddings": True},
    "Glm4MoeForCausalLM": {},
    "GlmForCausalLM": {},
    "GptOssForCausalLM": {},
    "MixtralForCausalLM": {"sliding_window": 24},
    "Qwen2MoeForCausalLM": {},
    "Gemma3ForCausalLM": {"sliding_window": 24, "tie_word_embeddings": True},
}  # fmt: skip

# Of attention: over all keys, in a window, in some layers in a window, and with sinks.
ATTENTIONS = ["Qwen3ForCausalLM", "MistralForCausalLM", "Gemma3ForCausalLM", "GptOssForCausalLM"]
CASES = [
    tuple(case)
    for case in AllPairs([ATTENTIONS, list(WORKLOADS), [1, 16, 64], ["radix", "naive"], [1, 2]])
]
CASES += [(name, "mixed", 16, "radix", 2) for name in ALL_ARCHITECTURES if name not in ATTENTIONS]


@dataclass
class Reference:
    """A prompt, the OUTPUTS ids that transformers generates, and the logits of each.

    logprobs: float64 [len(prompt) + OUTPUTS, vocab], of what follows each token.
    """

    prompt: list[int]
    ids: list[int]
    logits: np.ndarray
    logprobs: np.ndarray


class References:
    """Prompts of one architecture whose greedy choice is never close."""

    def __init__(self, folder) -> None:
        self.folder = folder
        self._model = load_reference(folder)
        self._rng = np.random.default_rng(0)

    def generate(self, length: int, many: int, prefix: list[int] = ()) -> list[Reference]:
        found: list[Reference] = []
        for _ in range(20):
            found += self._batch(length, 2 * many, list(prefix))
            if len(found) >= many:
                return found[:many]
        raise AssertionError("no prompts with clear greedy choices; change the checkpoint's seed")

    @torch.inference_mode()
    def _batch(self, length: int, many: int, prefix: list[int]) -> list[Reference]:
        tails = self._rng.integers(0, VOCAB_SIZE, (many, length - len(prefix))).tolist()
        prompts = torch.tensor([prefix + tail for tail in tails])
        out = self._model.generate(
            prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=OUTPUTS,
            do_sample=False, eos_token_id=None, output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        logits = torch.stack(out.logits, 1)
        best = logits.topk(2).values
        clear = (best[..., 0] - best[..., 1]).amin(1) > GAP
        return [
            Reference(
                prompts[i].tolist(), out.sequences[i, length:].tolist(), logits[i].numpy(),
                self.logprobs(out.sequences[i].tolist()),
            )
            for i in range(many)
            if clear[i]
        ]  # fmt: skip

    @torch.inference_mode()
    def logprobs(self, ids: list[int]) -> np.ndarray:
        """float64 [n, vocab]: of what follows each of `ids`."""
        return self._model(torch.tensor([ids])).logits[0].double().log_softmax(-1).numpy()


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    torch.set_num_threads(1)
    checkpoints = CheckpointCache(tmp_path_factory.mktemp("parity"))
    made: dict[str, dict] = {}

    def of(architecture: str) -> dict:
        if architecture not in made:
            source = References(checkpoints(architecture, **OVERRIDES[architecture]))
            mixed = [r for n in (1, 7, 47, 64, 100) for r in source.generate(n, 2)]
            made[architecture] = {
                "folder": source.folder,
                "logprobs": source.logprobs,
                "mixed": mixed + source.generate(150, 1),
            }
            if architecture in ATTENTIONS:
                prefix = source.generate(130, 1)[0].prompt
                shared = source.generate(140, 3, prefix) + source.generate(170, 1, prefix)
                made[architecture]["shared"] = shared
        return made[architecture]

    return of


def settings(page_size: int, cache: str, depth: int) -> Settings:
    return Settings(
        page_size=page_size, cache=cache, overlap_depth=depth, kv_pages=4096 // page_size,
        max_running=16, threads=1,
    )  # fmt: skip


@pytest.mark.parametrize(("architecture", "workload", "page_size", "cache", "depth"), CASES)
def test_same_logits_and_greedy_tokens_as_transformers(
    references, architecture, workload, page_size, cache, depth
):
    known = references(architecture)
    prompts = {
        "one": known["mixed"][-1:],
        "mixed": known["mixed"],
        "shared": known.get("shared"),
        "chunks": known["mixed"][4::2],
        "preempted": known["mixed"][:6],
    }[workload]
    cores = Cores(
        known["folder"],
        settings(page_size, cache, depth),
        policy="cores:Nuisance" if workload == "preempted" else "mixed",
        budget=7 if workload == "chunks" else 256,
    )
    asked = [ASKED[number % len(ASKED)] for number in range(len(prompts))]
    if workload == "shared":  # whose prompt has log-probs finds nothing: only the first's is
        asked[1:] = [(of_output, None) for of_output, _ in asked[1:]]
    for number, reference in enumerate(prompts):
        of_output, of_prompt = asked[number]
        params = RequestParams(
            temperature=0, max_tokens=OUTPUTS, ignore_eos=True, logprobs=of_output,
            prompt_logprobs=of_prompt,
        )  # fmt: skip
        cores.submit(f"r{number}", reference.prompt, params)
        if workload == "shared" and number == 0:
            cores.run()  # the first leaves its prefix to the others
    cores.run()
    for number, reference in enumerate(prompts):
        name, length = f"r{number}", len(reference.prompt)
        assert cores.outputs[name] == reference.ids
        check_request_logprobs(cores, name, reference.prompt, asked[number], reference.logprobs)
        logits = np.stack([cores.logits[name, length + i] for i in range(OUTPUTS)])
        error = np.abs(logits - reference.logits).max() / np.abs(reference.logits).max()
        assert error < TOLERANCE
    assert cores.scheduler.idle()
    if workload == "preempted":
        assert cores.scheduler.counts["preemptions"] > 3
    if workload == "shared":
        reused = [cores.cached[f"r{n}"] for n in range(1, len(prompts))]
        assert min(reused) >= 128 if cache == "radix" else max(reused) == 0


def check_request_logprobs(cores: Cores, name: str, prompt: list[int], asked, expected) -> None:
    """Those of a request that has ended. expected: [n, vocab], of what follows each token."""
    of_output, of_prompt = asked
    if of_output is None:
        assert cores.logprobs[name] == b""
    else:
        outputs = cores.outputs[name]
        check_logprobs(cores.logprobs[name], of_output, expected[len(prompt) - 1 : -1], outputs)
    if of_prompt is None:
        assert cores.prompt_logprobs[name] == b""
    else:
        check_prompt_logprobs(
            cores.prompt_logprobs[name], of_prompt, expected[: len(prompt)], prompt
        )


def check_whole(known, cores: Cores, name: str, prompt: list[int], params: RequestParams) -> None:
    """The same, by transformers' log-probs of what was said."""
    expected = known["logprobs"](prompt + cores.outputs[name])
    check_request_logprobs(cores, name, prompt, (params.logprobs, params.prompt_logprobs), expected)


def test_seeded_sampling_is_the_same_whatever_else_is_in_the_batch(references):
    known = references("Qwen3ForCausalLM")
    params = RequestParams(
        temperature=0.8, top_p=0.95, top_k=50, max_tokens=30, ignore_eos=True, logprobs=2
    )

    def run(crowd: int, policy: str) -> list[int]:
        cores = Cores(known["folder"], settings(16, "radix", 2), policy=policy)
        for number in range(crowd):
            reference = known["mixed"][number]
            cores.submit(f"other{number}", reference.prompt, params, seed=number)
        cores.submit("seeded", known["mixed"][-1].prompt, params, seed=1234)
        cores.run()
        check_whole(known, cores, "seeded", known["mixed"][-1].prompt, params)
        return cores.outputs["seeded"]

    alone = run(0, "mixed")
    assert run(10, "mixed") == alone
    assert run(5, "cores:Nuisance") == alone


BIASES = {token: (-1.5, 1.0, 2.5)[token % 3] for token in range(0, 256, 7)}


@torch.inference_mode()
def changed(model, prompt: list[int], params: RequestParams) -> list[int]:
    """Greedy ids by transformers' logits, with biases, and its repetition penalty; none if two are
    too close."""
    repetition = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)
    ids = torch.tensor([prompt])
    for _ in range(params.max_tokens):
        scores = model(ids).logits[:, -1].clone()
        scores[:, list(params.logit_bias)] += torch.tensor(list(params.logit_bias.values()))
        scores = repetition(ids, scores)
        said = torch.bincount(ids[0, len(prompt) :], minlength=scores.shape[1])
        scores -= params.frequency_penalty * said + params.presence_penalty * (said > 0)
        first, second = scores[0].topk(2).values
        if first - second < GAP:
            return []
        ids = torch.cat((ids, scores.argmax(-1, keepdim=True)), 1)
    return ids[0, len(prompt) :].tolist()


def test_penalties_and_biases_give_the_tokens_of_transformers_also_after_a_preemption(references):
    known = references("Qwen3ForCausalLM")
    model = load_reference(known["folder"])
    free = RequestParams(
        temperature=0, max_tokens=OUTPUTS, ignore_eos=True, logprobs=3, prompt_logprobs=1
    )
    kinds = [
        {}, {"repetition_penalty": 1.3}, {"frequency_penalty": 0.4}, {"presence_penalty": 1.5},
        {"repetition_penalty": 0.8, "frequency_penalty": 1.0, "presence_penalty": -0.5},
        {"logit_bias": BIASES}, {"logit_bias": BIASES, "repetition_penalty": 1.3},
    ]  # fmt: skip
    cores = Cores(known["folder"], settings(16, "radix", 2), policy="cores:Nuisance")
    expected, asked = {}, {}
    for kind in kinds:
        params = msgspec.structs.replace(free, **kind)
        reference, wanted = next(
            (reference, ids)
            for reference in known["mixed"]
            if (ids := changed(model, reference.prompt, params))
        )
        assert (wanted == reference.ids) == (not kind), "they make a difference"
        name = str(kind)
        expected[name] = wanted
        asked[name] = reference.prompt, params
        cores.submit(name, *asked[name])
    cores.run()
    assert cores.outputs == expected
    for name, (prompt, params) in asked.items():
        check_whole(known, cores, name, prompt, params)
    assert cores.scheduler.counts["preemptions"] > 1


def restricted(logits: np.ndarray, output: list[int], allowed, banned) -> np.ndarray:
    """`logits` [vocab] with what these two forbid behind `output` made impossible."""
    left = np.full_like(logits, -np.inf)
    where = slice(None) if allowed is None else list(allowed)
    left[where] = logits[where]
    for *before, token in banned:
        if output[len(output) - len(before) :] == before and len(before) <= len(output):
            left[token] = -np.inf
    return left


@pytest.mark.parametrize(("policy", "depth"), [("mixed", 1), ("cores:Nuisance", 2)])
def test_allowed_ids_and_banned_sequences_hold_in_every_step(references, policy, depth):
    """By the rule, over the logits that transformers gives for what was said, also where a request
    comes back with outputs; the prompt is no output."""
    known = references("Qwen3ForCausalLM")
    model = load_reference(known["folder"])
    reference = known["mixed"][0]
    prompt, free = reference.prompt, reference.ids
    one, pair, three, late = [tuple(free[a:b]) for a, b in ((0, 1), (3, 5), (8, 11), (10, OUTPUTS))]
    across = (prompt[-1], free[0])  # not banned: its first token is the prompt's
    few = tuple(sorted({*free[::2], 3, 4, 5}))
    kinds = {
        "few": (few, ()), "single": (None, (one,)), "pair": (None, (pair,)),
        "all": (None, (one, pair, three, late, across)), "late": (None, (late, three, across)),
        "both": (few, tuple((a, b) for a in few[:9] for b in few[:9] if b != 3)),
    }  # fmt: skip
    cores = Cores(known["folder"], settings(16, "radix", depth), policy=policy)
    for name, (allowed, banned) in kinds.items():
        for temperature in (0.0, 1.5):
            params = RequestParams(
                temperature=temperature, max_tokens=OUTPUTS, ignore_eos=True,
                allowed_token_ids=allowed,
                logit_bias={few[0]: 4.0, 250: 100.0} if name == "both" else {}, logprobs=2,
            )  # fmt: skip
            cores.submit(f"{name}{temperature}", prompt, params, seed=3, bad_word_ids=banned)
    cores.submit("free", prompt, RequestParams(temperature=0, max_tokens=OUTPUTS, ignore_eos=True))
    cores.run()
    assert cores.outputs["free"] == free
    for name, (allowed, banned) in kinds.items():
        for temperature in (0.0, 1.5):
            said = cores.outputs[f"{name}{temperature}"]
            assert len(said) == OUTPUTS
            with torch.inference_mode():
                logits = model(torch.tensor([prompt + said])).logits[0, len(prompt) - 1 : -1]
            raw = logits.double().log_softmax(-1).numpy()
            check_logprobs(cores.logprobs[f"{name}{temperature}"], 2, raw, said)
            for at, row in enumerate(logits.numpy()):
                row = row.copy()
                row[[few[0], 250]] += (name == "both") * np.array([4, 100], np.float32)
                left = restricted(row, said[:at], allowed, banned)
                assert np.isfinite(left[said[at]])
                assert temperature or left[said[at]] > left.max() - TOLERANCE
        assert cores.outputs[f"{name}0.0"] != free
    assert cores.scheduler.counts["preemptions"] > 1 or policy == "mixed"


def test_min_tokens_holds_back_the_stop_token(references):
    known = references("Qwen3ForCausalLM")
    reference = known["mixed"][-1]
    stop = reference.ids[4]
    first = reference.ids.index(stop)
    cores = Cores(known["folder"], settings(16, "radix", 2))
    params = RequestParams(temperature=0, max_tokens=OUTPUTS)
    cores.submit("free", reference.prompt, params, eos_ids=(stop,))
    held = RequestParams(temperature=0, max_tokens=OUTPUTS, min_tokens=20, logprobs=5)
    cores.submit("held", reference.prompt, held, eos_ids=(stop,))
    cores.run()
    assert cores.outputs["free"] == reference.ids[: first + 1]
    assert cores.finished["free"] == "stop"
    assert len(cores.outputs["held"]) > 20
    assert stop not in cores.outputs["held"][:20]
    check_whole(known, cores, "held", reference.prompt, held)


def test_the_largest_biases_choose_and_ban_at_any_temperature(references):
    known = references("Qwen3ForCausalLM")
    prompt, free = known["mixed"][-1].prompt, known["mixed"][-1].ids
    few = dict.fromkeys((3, 70, 71, 200), 100.0)
    banned = dict.fromkeys(free, -100.0)
    kinds = [
        {"temperature": 0.0}, {"temperature": 1.5}, {"temperature": 1.5, "top_k": 3},
        {"temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.2},
    ]  # fmt: skip
    cores = Cores(known["folder"], settings(16, "radix", 2), policy="cores:Nuisance")
    for seed, kind in enumerate(kinds):
        params = RequestParams(max_tokens=20, ignore_eos=True, logprobs=3, **kind)
        for name, biases in (("one", {70: 100.0}), ("few", few), ("banned", banned)):
            wanted = msgspec.structs.replace(params, logit_bias=biases)
            cores.submit(f"{name}{seed}", prompt, wanted, seed=seed)
    cores.run()
    for seed, kind in enumerate(kinds):
        assert cores.outputs[f"one{seed}"] == [70] * 20
        assert set(cores.outputs[f"few{seed}"]) <= set(few)
        assert not set(cores.outputs[f"banned{seed}"]) & set(free)
        assert len(set(cores.outputs[f"few{seed}"])) > 1 or not kind["temperature"]
        for name in ("one", "few", "banned"):
            check_whole(known, cores, f"{name}{seed}", prompt, params)
    assert cores.scheduler.counts["preemptions"] > 1


def test_a_biased_stop_token_waits_for_the_least_number_of_tokens(references):
    known = references("Qwen3ForCausalLM")
    cores = Cores(known["folder"], settings(16, "radix", 2), policy="cores:Nuisance")
    for temperature in (0.0, 0.8):
        params = RequestParams(
            temperature=temperature, max_tokens=40, min_tokens=12, stop_token_ids=(70,),
            logit_bias={70: 100.0, 71: 90.0}, logprobs=1,
        )  # fmt: skip
        cores.submit(f"held {temperature}", known["mixed"][-1].prompt, params, seed=1)
    cores.run()
    for name in cores.outputs:
        check_whole(known, cores, name, known["mixed"][-1].prompt, params)
        assert cores.outputs[name] == [71] * 12 + [70]
        assert cores.finished[name] == "stop"
