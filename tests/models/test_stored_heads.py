"""What a file has of embedding and head, and under which names, means what it means to
transformers: the engine's greedy tokens are transformers'.
"""

from __future__ import annotations

import json
import logging
import shutil
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parent.parent / "parity"))

from cores import Cores

from checkpoints import VOCAB_SIZE, load_reference
from pipeinfer.checkpoint.config import read_config
from pipeinfer.engine.choices import choose_engine
from pipeinfer.models.loading import check_checkpoint
from pipeinfer.params import RequestParams
from pipeinfer.settings import ConfigurationError, Settings
from quantized_checkpoints import quantize

WEIGHTS, EMBEDDING, HEAD = "model.safetensors", "model.embed_tokens.weight", "lm_head.weight"
TOKENS = 12
Tensors = dict[str, torch.Tensor]
Change = Callable[[Tensors], Tensors]


def as_it_is(tensors: Tensors) -> Tensors:
    return tensors


def head_stored_too(tensors: Tensors) -> Tensors:
    return tensors | {HEAD: tensors[EMBEDDING].clone()}


def head_that_differs(tensors: Tensors) -> Tensors:
    head = tensors[EMBEDDING].clone()
    head[-40:] = 1.5 * head[-40:].roll(1, 0)  # so the comparison reads to the end
    return tensors | {HEAD: head}


def head_alone(tensors: Tensors) -> Tensors:
    return {HEAD if name == EMBEDDING else name: one for name, one in tensors.items()}


def bare(tensors: Tensors) -> Tensors:
    return {name.removeprefix("model."): one for name, one in tensors.items()}


def wrapped(tensors: Tensors) -> Tensors:
    return {f"model.{name}": one for name, one in tensors.items()}


def bare_and_differs(tensors: Tensors) -> Tensors:
    return bare(head_that_differs(tensors))


CASES = [
    ("LlamaForCausalLM", True, as_it_is),
    ("LlamaForCausalLM", True, head_stored_too),
    ("LlamaForCausalLM", True, head_that_differs),
    ("Qwen3ForCausalLM", True, head_that_differs),
    ("Gemma3ForCausalLM", True, head_that_differs),
    ("LlamaForCausalLM", True, head_alone),
    ("Gemma3ForCausalLM", True, head_alone),
    ("LlamaForCausalLM", True, bare),
    ("Qwen3MoeForCausalLM", True, bare),
    ("Qwen2ForCausalLM", True, bare_and_differs),
    ("LlamaForCausalLM", False, bare),
    ("LlamaForCausalLM", False, wrapped),
]


@pytest.fixture
def changed(checkpoint, tmp_path):
    """(architecture, tied, change of its tensors) to a folder."""

    def make(architecture: str, tied: bool, change: Change, **overrides) -> Path:
        source = checkpoint(architecture, tie_word_embeddings=tied, **overrides)
        folder = Path(shutil.copytree(source, tmp_path / "changed"))
        tensors = change(load_file(folder / WEIGHTS))
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        return folder

    return make


def prompt() -> list[int]:
    return torch.randint(0, 256, (24,), generator=torch.Generator().manual_seed(4)).tolist()


def greedy(folder: Path) -> list[int]:
    """transformers' tokens, whatever ends an answer."""
    model, ids = load_reference(folder), prompt()
    with torch.inference_mode():
        for _ in range(TOKENS):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[-TOKENS:]


def answer(folder: Path, **further) -> list[int]:
    cores = Cores(folder, Settings(kv_pages=16, page_size=16, max_running=2, **further))
    params = RequestParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    cores.submit("a", prompt(), params)
    cores.run()
    return cores.outputs["a"]


@pytest.mark.parametrize(("architecture", "tied", "change"), CASES)
def test_greedy_tokens_are_those_of_transformers(changed, architecture, tied, change):
    folder = changed(architecture, tied, change)
    assert answer(folder) == greedy(folder)


def test_a_head_that_differs_is_used_and_said_and_one_that_does_not_is_the_embedding(
    changed, caplog
):
    folder = changed("LlamaForCausalLM", True, head_that_differs)
    with caplog.at_level(logging.WARNING):
        assert not choose_engine(Settings(), folder).config.tie_word_embeddings
    assert "lm_head.weight is stored and differs" in caplog.text
    tensors = load_file(folder / WEIGHTS)
    save_file(head_stored_too(tensors), folder / WEIGHTS)
    caplog.clear()
    assert choose_engine(Settings(), folder).config.tie_word_embeddings and not caplog.records


def test_two_files_that_an_index_names_are_compared_too(changed):
    folder = changed("LlamaForCausalLM", True, head_that_differs)
    tensors = load_file(folder / WEIGHTS)
    wanted = answer(folder)
    files = {name: "b.safetensors" if name == HEAD else "a.safetensors" for name in tensors}
    for file in set(files.values()):
        part = {name: one for name, one in tensors.items() if files[name] == file}
        save_file(part, folder / file, metadata={"format": "pt"})
    (folder / WEIGHTS).unlink()
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": files})
    )
    assert answer(folder) == wanted == greedy(folder)


@pytest.mark.parametrize("change", [head_alone, head_that_differs])
def test_ranks_share_the_head_that_one_rank_has(changed, change):
    from test_tensor_parallel_shares import ThreadGroup

    folder = changed("LlamaForCausalLM", True, change, vocab_size=VOCAB_SIZE + 1)
    group = ThreadGroup(2)

    def of_rank(rank: int) -> torch.Tensor:
        return _logits(folder, rank, group)

    with ThreadPoolExecutor(2) as pool:
        parts = list(pool.map(of_rank, range(2)))
    torch.testing.assert_close(parts[0], _logits(folder, 0, None), atol=1e-4, rtol=1e-4)
    with torch.inference_mode():
        theirs = load_reference(folder)(torch.tensor([prompt()])).logits[0]
    torch.testing.assert_close(parts[1], theirs, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def _logits(folder: Path, rank: int, group) -> torch.Tensor:
    from dense_attention import dense_causal
    from pipeinfer.layers.placement import Shard
    from pipeinfer.models.loading import build_model, load_weights

    shard = Shard(rank, 1 if group is None else 2)
    config, stored = check_checkpoint(folder, read_config(folder), shard)
    model = build_model(config, shard, collectives=None if group is None else group.view(rank))
    load_weights(model, folder, tensors=stored)
    ids = torch.tensor(prompt())
    hidden = model(ids, torch.arange(len(ids)), dense_causal(model.attention_shapes()))
    return model.logits(hidden)


def test_an_untied_head_does_not_stand_for_an_embedding(changed):
    folder = changed("LlamaForCausalLM", False, lambda tensors: _without(tensors, EMBEDDING))
    with pytest.raises(ConfigurationError, match=r"lacks tensor model\.embed_tokens\.weight"):
        choose_engine(Settings(), folder)


def _without(tensors: Tensors, name: str) -> Tensors:
    return {key: one for key, one in tensors.items() if key != name}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({HEAD: torch.zeros(3, 64)}, r"lm_head\.weight in .* has shape \[3, 64\]"),
        (
            {HEAD: torch.zeros(VOCAB_SIZE, 64).to(torch.float8_e4m3fn)},
            r"lm_head\.weight in .* is F8_E4M3; supported",
        ),
        (
            {"lm_head.qweight": torch.zeros(2, 2).int()},
            r"lm_head\.qweight .* quantized head is not",
        ),
        (
            {"lm_head.weight_scale": torch.ones(1)},
            r"lm_head\.weight_scale .* quantized head is not",
        ),
        ({"embed_tokens.weight": torch.zeros(VOCAB_SIZE, 64)}, r"two tensors for model\.embed_tok"),
    ],
)
def test_a_head_that_cannot_be_read_is_refused_by_name(changed, more, message):
    folder = changed("LlamaForCausalLM", True, lambda tensors: tensors | more)
    with pytest.raises(ConfigurationError, match=message):
        choose_engine(Settings(), folder)


@pytest.mark.parametrize("form", ["fp8 rows", "gptq"])
@pytest.mark.parametrize("change", [head_that_differs, head_alone])
def test_beside_quantized_matrices_heads_mean_the_same(changed, tmp_path, form, change):
    folder = changed("LlamaForCausalLM", True, change)
    quantized, plain = quantize(folder, tmp_path / "both", form)
    assert answer(quantized) == greedy(plain)


def test_columns_in_another_order_are_refused_by_name(checkpoint, tmp_path):
    """As desc_act gives them, whatever config.json says of it."""
    folder, _ = quantize(checkpoint("LlamaForCausalLM"), tmp_path, "gptq")
    choose_engine(Settings(), folder)
    name = "model.layers.1.mlp.up_proj.g_idx"
    tensors = load_file(folder / WEIGHTS)
    save_file(tensors | {name: tensors[name].flip(0)}, folder / WEIGHTS)
    with pytest.raises(ConfigurationError, match=rf"{name} in .* columns in another order"):
        choose_engine(Settings(), folder)


def test_a_shape_that_is_not_that_of_the_matrix_is_refused_by_name(checkpoint, tmp_path):
    folder, _ = quantize(checkpoint("LlamaForCausalLM"), tmp_path, "4 bits")
    choose_engine(Settings(), folder)
    name = "model.layers.0.self_attn.o_proj.weight_shape"
    tensors = load_file(folder / WEIGHTS)
    save_file(tensors | {name: tensors[name] + torch.tensor([0, 8])}, folder / WEIGHTS)
    with pytest.raises(ConfigurationError, match=rf"{name} in .* is not the shape of what is pack"):
        choose_engine(Settings(), folder)


@pytest.mark.parametrize("rope", ["default", "linear", "llama3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_stored_frequencies_are_compared_and_those_of_the_configuration_used(
    changed, caplog, rope, dtype
):
    """Older files have them, those of a scaled RoPE without its scaling."""
    true = 1.0 / 10_000.0 ** (torch.arange(0, 16, 2) / 16)
    name = "model.layers.1.self_attn.rotary_emb.inv_freq"
    further = {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if rope == "llama3" else {}
    further |= {} if rope == "default" else {"factor": 2.0}
    overrides = {"rope_parameters": {"rope_type": rope, "rope_theta": 1e4, **further}}
    folder = changed(
        "LlamaForCausalLM", False, lambda tensors: tensors | {name: true.to(dtype)}, **overrides
    )
    caplog.clear()  # of what transformers says, which wrote it
    choose_engine(Settings(), folder)
    assert not caplog.records
    tensors = load_file(folder / WEIGHTS)
    save_file(tensors | {name: (true * 1.1).to(dtype)}, folder / WEIGHTS, metadata={"format": "pt"})
    choose_engine(Settings(), folder)
    assert f"{name} is not what config.json says of RoPE" in caplog.text
    if dtype == torch.float32:
        assert answer(folder) == greedy(folder)
