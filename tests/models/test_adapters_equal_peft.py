"""Models with low-rank adapters give the logits that PEFT gives: every layer, rank, scale and
split over ranks, and many adapters beside one another."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from adapter_files import LINEAR, peft_logits, write_adapter
from checkpoints import CheckpointCache, load_reference
from dense_attention import dense_causal
from models.test_tensor_parallel_shares import ThreadGroup
from pipeinfer.checkpoint.config import read_config, read_outline
from pipeinfer.checkpoint.lora import identify, read_adapter
from pipeinfer.engine.lora import check_adapter, load_adapter
from pipeinfer.layers.lora import AdapterBank
from pipeinfer.layers.placement import Collectives, Shard
from pipeinfer.models.causal_lm import LanguageModel
from pipeinfer.models.loading import build_model, load_weights
from pipeinfer.models.transformers_backend import inspect_model, load_model
from pipeinfer.settings import ConfigurationError
from transformers_checkpoints import write_transformers_checkpoint

LENGTH, RANK, SLOTS = 24, 16, 3
TOLERANCE = 1e-4
CPU = torch.device("cpu")
# GLM's gate and up are one matrix on disk, and its RoPE turns neighbours: rows have another order.
ARCHITECTURES: dict[str, list[str]] = {
    "LlamaForCausalLM": LINEAR,
    "Qwen3ForCausalLM": LINEAR,
    "MistralForCausalLM": LINEAR,
    "Gemma3ForCausalLM": LINEAR,
    "Glm4ForCausalLM": [*LINEAR[:4], "gate_up_proj", "down_proj"],
}


def tokens_of(seed: int = 1) -> torch.Tensor:
    return torch.randint(0, 256, (LENGTH,), generator=torch.Generator().manual_seed(seed))


def bank() -> AdapterBank:
    made = AdapterBank(SLOTS, RANK, torch.float32, CPU)
    made.reserve(SLOTS * LENGTH)
    return made


def put(slots: AdapterBank, slot: int, folder: Path) -> None:
    slots.put(slot, load_adapter(identify("any", str(folder), RANK), slots))


def adapted(slots: AdapterBank, token_adapters: list[int]) -> AbstractContextManager[None]:
    return slots.adapting(torch.tensor(token_adapters, dtype=torch.int32))


@torch.inference_mode()
def logits_of(model: LanguageModel, slots: AdapterBank, slot: int, tokens: torch.Tensor) -> Any:
    with adapted(slots, [slot] * len(tokens)):
        hidden = model(tokens, torch.arange(len(tokens)), dense_causal(model.attention_shapes()))
    return model.logits(hidden)


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_all_linear_layers_of_an_architecture(
    checkpoint: CheckpointCache, architecture: str, tmp_path: Path
) -> None:
    folder, tokens, slots = checkpoint(architecture), tokens_of(), bank()
    reference = load_reference(folder)
    model = build_model(read_config(folder), adapters=slots)
    load_weights(model, folder)
    plain = model.logits(
        model(tokens, torch.arange(LENGTH), dense_causal(model.attention_shapes()))
    )
    write_adapter(tmp_path, reference, 3, target_modules=ARCHITECTURES[architecture])
    put(slots, 2, tmp_path)
    expected = peft_logits(reference, tmp_path, tokens)
    assert relative(plain, expected) > 0.1  # the adapter shows
    assert relative(logits_of(model, slots, 2, tokens), expected) < TOLERANCE
    assert torch.equal(logits_of(model, slots, 0, tokens), plain)


KINDS: dict[str, dict[str, Any]] = {
    "rsLoRA": {"use_rslora": True, "r": 4},
    "greatest rank": {"r": RANK, "lora_alpha": 5},
    "ranks and alphas by pattern": {
        "rank_pattern": {"q_proj": 3, r"layers.1.mlp.up_proj": 16},
        "alpha_pattern": {"v_proj": 3, r"^model.layers.0.mlp.\w+_proj": 2},
    },
    "keys alone": {"target_modules": ["k_proj"]},
    "one layer": {"layers_to_transform": [1], "init_lora_weights": "gaussian"},
}


@pytest.fixture(scope="module")
def llama(checkpoint: CheckpointCache) -> tuple[Path, Any]:
    folder = checkpoint("LlamaForCausalLM", attention_bias=True, mlp_bias=True)
    return folder, load_reference(folder)


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_ranks_scales_and_targets(
    llama: tuple[Path, Any], options: dict[str, Any], tmp_path: Path
) -> None:
    folder, reference = llama
    slots, tokens = bank(), tokens_of()
    model = build_model(read_config(folder), adapters=slots)
    load_weights(model, folder)
    write_adapter(tmp_path, reference, 5, **options)
    put(slots, 1, tmp_path)
    expected = peft_logits(reference, tmp_path, tokens)
    assert relative(logits_of(model, slots, 1, tokens), expected) < TOLERANCE


@torch.inference_mode()
def test_many_adapters_in_one_step_and_a_slot_that_gets_another(
    llama: tuple[Path, Any], tmp_path: Path
) -> None:
    folder, reference = llama
    slots = bank()
    model = build_model(read_config(folder), adapters=slots)
    load_weights(model, folder)
    folders = [
        write_adapter(tmp_path / str(seed), reference, seed, r=seed, target_modules=modules)
        for seed, modules in ((2, LINEAR), (16, ["q_proj", "down_proj"]), (7, LINEAR))
    ]
    put(slots, 1, folders[0])
    put(slots, 2, folders[1])
    mixed = [0, 1, 2, 2, 1, 0] * 4
    tokens, positions = tokens_of(), torch.zeros(LENGTH, dtype=torch.int64)
    alone = split_by_token(model)

    def each(numbers: list[int]) -> torch.Tensor:
        with adapted(slots, numbers):
            return model.logits(model(tokens, positions, alone))

    whole = each(mixed)
    for slot in (0, 1, 2):
        rows = [at for at, one in enumerate(mixed) if one == slot]
        assert relative(whole[rows], each([slot] * LENGTH)[rows]) < 1e-5
    before = logits_of(model, slots, 1, tokens)
    put(slots, 1, folders[1])  # what it lacks is zero, and not what was there
    assert relative(before, logits_of(model, slots, 1, tokens)) > 0.1
    expected = peft_logits(reference, folders[1], tokens)
    assert relative(logits_of(model, slots, 1, tokens), expected) < TOLERANCE


def split_by_token(model: LanguageModel) -> Callable[..., torch.Tensor]:
    """Attention of tokens that are sequences of their own."""
    shapes = model.attention_shapes()

    def attend(layer: int, heads: Any) -> torch.Tensor:
        _, _, values = heads.split_and_rotate()
        group = shapes[layer].num_heads // shapes[layer].num_kv_heads
        return values.repeat_interleave(group, dim=1)

    return attend


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Glm4ForCausalLM"])
@pytest.mark.parametrize("ranks", [2, 4])  # four share two KV heads
def test_ranks_together_give_what_one_gives(
    checkpoint: CheckpointCache, architecture: str, ranks: int, tmp_path: Path
) -> None:
    folder, tokens = checkpoint(architecture), tokens_of()
    reference = load_reference(folder)
    write_adapter(tmp_path, reference, 3, target_modules=ARCHITECTURES[architecture])
    expected = peft_logits(reference, tmp_path, tokens)
    group = ThreadGroup(ranks)

    def of_rank(rank: int) -> torch.Tensor:
        slots, view = bank(), group.view(rank)
        collectives: Collectives = view
        config, shard = read_config(folder), Shard(rank, ranks)
        model = build_model(config, shard, collectives=collectives, adapters=slots)
        load_weights(model, folder)
        put(slots, 1, tmp_path)
        return logits_of(model, slots, 1, tokens)

    with ThreadPoolExecutor(ranks) as pool:
        for logits in pool.map(of_rank, range(ranks)):
            assert relative(logits, expected) < TOLERANCE


@pytest.mark.parametrize(
    ("model_type", "targets"),
    [
        ("phi3", ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]),
        ("stablelm", LINEAR),
        ("olmoe", LINEAR[:4]),
    ],
)
def test_models_that_transformers_builds(
    model_type: str, targets: list[str], tmp_path: Path
) -> None:
    folder = write_transformers_checkpoint(tmp_path / "model", model_type)
    spec = inspect_model(folder, read_outline(folder, "transformers"), 256)
    model, slots, tokens = load_model(spec, folder, 0, CPU, torch.float32, 256), bank(), tokens_of()
    model.use_adapters(slots)
    reference = load_reference(folder)
    write_adapter(tmp_path / "adapter", reference, 3, 0.2, target_modules=targets)
    put(slots, 1, tmp_path / "adapter")
    expected = peft_logits(reference, tmp_path / "adapter", tokens)
    assert relative(logits_of(model, slots, 1, tokens), expected) < TOLERANCE


# ---------------------------------------------------------------------------------------- refusals

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "DoRA": ({"use_dora": True}, "DoRA"),
    "biases": ({"bias": "all"}, "bias 'all'"),
    "whole modules": ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    "rank": ({"r": 17}, "rank 17, --max-lora-rank is 16"),
    "another kind": ({"peft_type": "IA3"}, "peft_type 'IA3'"),
    "a changed base": ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa'"),
    "experts' parameters": ({"target_parameters": ["experts.gate_up_proj"]}, "experts"),
    "patterns that never end": ({"rank_pattern": {"(a*)*b": 3}}, "is not served"),
    "patterns that are none": ({"alpha_pattern": {"[": 3}}, "no pattern"),
    "a rank that is none": ({"r": "many"}, "ranks from 1"),
    "alpha without end": ({"lora_alpha": 1e300}, "lora_alpha"),
}


@pytest.fixture(scope="module")
def adapter(llama: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapter(tmp_path_factory.mktemp("adapter"), llama[1], 4)


@pytest.mark.parametrize(("fields", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_served_is_refused_by_name(
    adapter: Path, fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(adapter, tmp_path / "adapter"))
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | fields))
    if fields.get("r") == 17:
        tensors = load_file(folder / "adapter_model.safetensors")
        wider = {
            name: torch.zeros(17, one.shape[1]) if "lora_A" in name else torch.zeros(len(one), 17)
            for name, one in tensors.items()
        }
        save_file(wider, folder / "adapter_model.safetensors")
    with pytest.raises(ConfigurationError, match=message):
        read_adapter(folder, RANK)


Q_PROJ = "base_model.model.model.layers.0.self_attn.q_proj"
TENSORS: dict[str, tuple[dict[str, torch.Tensor], str]] = {
    "embeddings": (
        {"base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(8, 9)},
        "embeddings or the head",
    ),
    "a head": ({"base_model.model.lm_head.lora_A.weight": torch.zeros(8, 64),
                "base_model.model.lm_head.lora_B.weight": torch.zeros(300, 8)}, "no linear layer"),
    "experts": (
        {"base_model.model.model.layers.0.mlp.experts.0.up_proj.lora_A.weight": torch.zeros(8, 64),
         "base_model.model.model.layers.0.mlp.experts.0.up_proj.lora_B.weight": torch.zeros(64, 8)},
        "experts are not served",
    ),
    "half a pair": ({f"{Q_PROJ}x.lora_A.weight": torch.zeros(8, 64)}, "lacks its lora_B"),
    "another shape": ({f"{Q_PROJ}.lora_A.weight": torch.zeros(8, 65)}, "the model's is"),
    "another rank": ({f"{Q_PROJ}.lora_A.weight": torch.zeros(9, 64)}, "says rank 8"),
    "numbers of another kind": (
        {f"{Q_PROJ}.lora_A.weight": torch.zeros(8, 64, dtype=torch.int32)}, "I32"),
    "magnitudes": (
        {f"{Q_PROJ}.lora_magnitude_vector": torch.zeros(64)}, "DoRA"),
    "anything": ({"x": torch.zeros(1)}, "no low-rank pair"),
}  # fmt: skip


@pytest.mark.parametrize(("tensors", "message"), TENSORS.values(), ids=TENSORS)
def test_tensors_that_do_not_fit_are_refused_by_name(
    llama: tuple[Path, Any],
    adapter: Path,
    tensors: dict[str, torch.Tensor],
    message: str,
    tmp_path: Path,
) -> None:
    folder, slots = Path(shutil.copytree(adapter, tmp_path / "adapter")), bank()
    build_model(read_config(llama[0]), adapters=slots)
    file = folder / "adapter_model.safetensors"
    save_file(load_file(file) | tensors, file)
    with pytest.raises(ConfigurationError, match=message):
        check_adapter(read_adapter(folder, RANK), slots)


def test_broken_missing_and_changed_files_are_refused(
    llama: tuple[Path, Any], adapter: Path, tmp_path: Path
) -> None:
    folder, slots = Path(shutil.copytree(adapter, tmp_path / "adapter")), bank()
    build_model(read_config(llama[0]), adapters=slots)
    file = folder / "adapter_model.safetensors"
    named = identify("any", str(folder), RANK)
    assert named.digest == identify("other", str(adapter), RANK).digest
    whole = file.read_bytes()
    file.write_bytes(whole[:-4] + b"\x00\x00\x80\x3f")
    with pytest.raises(ConfigurationError, match="others than when it was named"):
        load_adapter(named, slots)
    for content, message in ((whole[:-4], "truncated"), (b"\xff" * 64, "not a safetensors file")):
        file.write_bytes(content)
        with pytest.raises(ConfigurationError, match=message):
            read_adapter(folder, RANK)
    file.rename(folder / "adapter_model.bin")
    with pytest.raises(ConfigurationError, match="it is a pickle"):
        read_adapter(folder, RANK)
    (folder / "adapter_config.json").write_text("[" * 100_000)
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_adapter(folder, RANK)
    with pytest.raises(ConfigurationError, match="no folder"):
        read_adapter(tmp_path / "nothing", RANK)
