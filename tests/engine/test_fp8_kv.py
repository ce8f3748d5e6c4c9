"""Keys and values in 8 bits: what is computed is what rounded keys and values give, however a
request comes to its tokens, and what cannot be is refused.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from single_steps import Row, build_step

sys.path.insert(0, str(Path(__file__).parent.parent / "parity"))

from cores import Cores

from dense_attention import causal, split
from kept_logits import logits_of
from pipeinfer.checkpoint.config import read_config
from pipeinfer.engine.choices import choose_engine
from pipeinfer.engine.kv_store import find_key_centers
from pipeinfer.engine.loading import load_engine
from pipeinfer.kernels.formats import KVScales, hadamard_transform
from pipeinfer.models.loading import build_model, check_checkpoint, load_weights
from pipeinfer.params import RequestParams
from pipeinfer.settings import ConfigurationError, Settings, parse_flags

FP8 = {"kv_cache_dtype": "fp8_e4m3"}
# Windows shorter than what is computed, and sinks.
ARCHITECTURES = ("Qwen3ForCausalLM", "GptOssForCausalLM", "Gemma3ForCausalLM")
NAMES = {
    "llm-compressor": "self_attn.{0}_scale",
    "vllm": "self_attn.attn.{0}_scale",
    "modelopt": "self_attn.{0}_proj.{0}_scale",
    "compressed-tensors": "self_attn.{0}_proj.output_scale",
}


def with_scales(folder: Path, into: Path, names: str, scales: dict[str, torch.Tensor]) -> Path:
    """A copy of the checkpoint with tensors "LAYER PART", in that way of naming them."""
    shutil.copytree(folder, into)
    file = into / "model.safetensors"
    tensors = load_file(file)
    for key, value in scales.items():
        layer, part = key.split()
        tensors[f"model.layers.{layer}.{NAMES[names].format(part)}"] = value
    save_file(tensors, file, metadata={"format": "pt"})
    return into


def rounded(values: torch.Tensor, scale: float) -> torch.Tensor:
    return (values / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


@torch.inference_mode()
def expected(folder: Path, ids: list[int], scales=None) -> torch.Tensor:
    """Logits [T, vocab] in float32, all positions at once, of rounded keys and values, keys as
    pages have them; of exact ones without `scales`."""
    model = build_model(read_config(folder))
    load_weights(model, folder)
    attend = causal(model.attention_shapes())
    centers = find_key_centers(model, 10**6, torch.device("cpu"))

    def narrow(layer, q, k, v):
        if scales is not None:
            center = 0 if centers[layer] is None else centers[layer]
            k = (
                hadamard_transform(rounded(hadamard_transform(k - center), scales[layer].k))
                + center
            )
            v = rounded(v, scales[layer].v)
        return attend(layer, q, k, v)

    tokens = torch.tensor(ids)
    return model.logits(model(tokens, torch.arange(len(ids)), split(narrow)))


def computed(folder: Path, ids: list[int], cuts: list[int]) -> torch.Tensor:
    """Logits of the last token of each of these parts of a request, by an engine."""
    engine = load_engine(Settings(kv_pages=16, page_size=16, max_running=2, **FP8), folder)
    pages, found = np.array([5, 3, 8, 2, 9, 7]), []
    for number, (begin, end) in enumerate(zip([0, *cuts], [*cuts, len(ids)], strict=True)):
        row = Row(0, begin, ids[begin:end], pages, True)
        found.append(logits_of(engine.runner, build_step([row], number, len(pages)))[0])
    return torch.stack(found)


def ids_of(length: int) -> list[int]:
    return np.random.default_rng(3).integers(0, 256, length).tolist()


def apart(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_are_those_of_rounded_keys_and_values(checkpoint, architecture):
    """A whole prompt, a chunk behind it, and decodes."""
    folder, ids, cuts = checkpoint(architecture), ids_of(70), [40, 67, 68, 69]
    got = computed(folder, ids, cuts)
    at = torch.tensor([*cuts, len(ids)]) - 1
    ones = [KVScales()] * read_config(folder).num_layers
    assert apart(got, expected(folder, ids, ones)[at]) < 1e-4
    assert apart(got, expected(folder, ids)[at]) > 1e-3, "rounding shows"


@pytest.mark.parametrize("names", NAMES)
def test_scales_of_a_checkpoint_are_used(checkpoint, tmp_path, names, caplog):
    scales = {"0 k": torch.tensor(0.03), "0 v": torch.tensor([0.004]),
              "1 v": torch.tensor(0.5, dtype=torch.bfloat16), "1 q": torch.tensor(9.0)}  # fmt: skip
    folder = with_scales(checkpoint("Qwen3ForCausalLM"), tmp_path / "scaled", names, scales)
    read = [KVScales(float(scales["0 k"]), float(scales["0 v"])), KVScales(1.0, 0.5)]
    choices = choose_engine(Settings(**FP8), folder)
    assert list(choices.kv_scales) == read
    assert choose_engine(Settings(), folder).kv_scales is None and not caplog.records, (
        "ignored in silence"
    )
    ids = ids_of(30)
    if names == "vllm":  # once is enough
        got, wanted = computed(folder, ids, [20]), expected(folder, ids, read)[[19, 29]]
        assert apart(got, wanted) < 1e-4
        assert apart(got, expected(folder, ids, [KVScales()] * 2)[[19, 29]]) > 1e-3


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (torch.tensor([1.0, 2.0]), r"1.self_attn.k_scale in .* is F32 \[2\]; .* takes one number"),
        (torch.tensor(0.0), "k_scale in .* is 0, no positive number"),
        (torch.tensor(float("nan")), "k_scale in .* is nan, no positive number"),
    ],
)
def test_scales_that_mean_nothing_are_refused_and_only_where_they_are_asked_for(
    checkpoint, tmp_path, scale, message
):
    folder = checkpoint("Qwen3ForCausalLM")
    folder = with_scales(folder, tmp_path / "scaled", "llm-compressor", {"1 k": scale})
    with pytest.raises(ConfigurationError, match=message):
        choose_engine(Settings(**FP8), folder)
    assert choose_engine(Settings(), folder).kv_scales is None


def test_two_scales_for_one_thing_are_refused(checkpoint, tmp_path):
    folder = checkpoint("Qwen3ForCausalLM")
    one, two = {"0 v": torch.tensor(0.5)}, {"0 v": torch.tensor(0.25)}
    folder = with_scales(folder, tmp_path / "one", "vllm", one)
    folder = with_scales(folder, tmp_path / "two", "llm-compressor", two)
    with pytest.raises(ConfigurationError, match=r"two scales of V in layer 0: 0\.5, and 0\.25 as"):
        choose_engine(Settings(**FP8), folder)


PROMPTS = [ids_of(120)[n:] for n in (0, 5, 60)]
WANTED = 24


def generated(folder, budget=256, policy="mixed", prompts=PROMPTS, loaded=None, **settings):
    """Tokens by request, and the cores."""
    settings = {"kv_pages": 40, "page_size": 16, "max_running": 4} | FP8 | settings
    made = Cores(folder, Settings(**settings), policy, budget=budget, loaded=loaded)
    for index, prompt in enumerate(prompts):
        seed = index % len(PROMPTS)  # the same prompt, asked again, is the same request
        params = RequestParams(temperature=0.7 * (seed % 2), max_tokens=WANTED, ignore_eos=True)
        made.submit(f"r{index}", prompt, params, seed=seed)
    made.run()
    assert set(made.finished.values()) == {"length"}
    return made.outputs, made


def test_chunks_prefix_hits_and_preemptions_give_the_same_tokens(checkpoint):
    folder = checkpoint("GptOssForCausalLM")
    whole, made = generated(folder)
    assert not any(made.cached.values())
    assert generated(folder, budget=23)[0] == whole
    assert generated(folder, policy="cores:Nuisance")[0] == whole
    again = generated(folder, prompts=[*PROMPTS, PROMPTS[0]], max_running=1)[1]
    assert again.cached["r3"] >= 96 and again.outputs["r3"] == whole["r0"]
    assert generated(folder, kv_cache_dtype="auto")[0] != whole, "rounding shows"


def test_an_engine_with_pages_of_8_bits_says_so_and_has_more_of_them(checkpoint, monkeypatch):
    folder = checkpoint("LlamaForCausalLM")
    monkeypatch.setattr("pipeinfer.engine.machine.available_bytes", lambda: 2**20)
    narrow = load_engine(Settings(dtype="bfloat16", kv_cache_dtype="fp8"), folder)
    usual = load_engine(Settings(dtype="bfloat16", kv_cache_dtype="bfloat16"), folder)
    assert (narrow.kv_dtype, usual.kv_dtype) == ("fp8_e4m3", "auto")
    assert (narrow.dtype, usual.dtype) == ("bfloat16", "bfloat16")
    assert abs(narrow.pages - 2 * usual.pages) <= 2


@pytest.mark.parametrize("dtype", ["auto", "float16"])
def test_pages_in_bfloat16_for_a_model_that_is_not_are_refused(checkpoint, dtype):
    with pytest.raises(ConfigurationError, match=r"--kv-cache-dtype bfloat16: .* float(32|16), "):
        choose_engine(
            Settings(dtype=dtype, kv_cache_dtype="bfloat16"), checkpoint("LlamaForCausalLM")
        )


def test_random_weights_have_no_scales(checkpoint):
    folder = checkpoint("LlamaForCausalLM")
    layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    choices = choose_engine(Settings(load_format="dummy", **FP8), folder)
    assert choices.kv_scales == (KVScales(),) * layers


def test_the_flag_has_the_name_that_other_servers_have():
    assert parse_flags(["--kv-cache-dtype", "fp8"]) == {"kv_cache_dtype": "fp8"}


def test_a_checkpoint_without_scales_lacks_none(checkpoint):
    folder = checkpoint("LlamaForCausalLM")
    assert check_checkpoint(folder, read_config(folder))
    assert choose_engine(Settings(**FP8), folder).kv_scales == (KVScales(),) * 2
