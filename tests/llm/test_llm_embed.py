"""Vectors of texts by LLM.embed, against what transformers computes."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from checkpoints import CheckpointCache
from embedding_checkpoints import (
    PROMPTS,
    cosines,
    expected_vectors,
    texts,
    with_modules,
    without_head,
)
from pipeinfer import LLM, PoolingParams
from pipeinfer.cli.main import main
from pipeinfer.llm import ConfigurationError, RequestError
from pipeinfer.runtime.supervisor import check_model
from pipeinfer.settings import Settings


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> CheckpointCache:
    return CheckpointCache(tmp_path_factory.mktemp("generating"))


def embedding_model(cache: CheckpointCache, folder: Path, architecture: str) -> Path:
    """As Qwen3-Embedding and E5-Mistral are stored."""
    made = without_head(cache(architecture), folder)
    return with_modules(made, "Normalize", prompts={"prompts": PROMPTS})


@pytest.mark.parametrize("architecture", ["MistralForCausalLM", "Qwen3ForCausalLM"])
def test_vectors_are_those_of_transformers(cache, tmp_path, in_process, architecture):
    folder = embedding_model(cache, tmp_path / "model", architecture)
    asked = texts(100)
    expected = expected_vectors(folder, asked)
    with LLM(str(folder), **in_process, max_step_tokens=64) as llm:  # longer texts come in chunks
        outputs = llm.embed(asked)
        again = llm.embed(asked[:5])  # out of the prefix cache
    found = np.array([one.outputs.embedding for one in outputs])
    assert cosines(found, expected).min() >= 0.9999
    np.testing.assert_allclose(found, expected, atol=2e-5)
    assert [len(one.prompt_token_ids) for one in outputs[:2]] == [len(t) + 1 for t in asked[:2]]
    assert all(one.finished and one.outputs.hidden_size == 64 for one in outputs)
    assert any(one.num_cached_tokens for one in again)
    np.testing.assert_allclose([one.outputs.embedding for one in again], found[:5], atol=1e-5)


def test_a_generating_model_makes_vectors_where_it_is_asked_to(cache, in_process):
    folder = cache("Qwen3ForCausalLM")
    asked = texts(10)
    with LLM(str(folder), task="embed", **in_process) as llm:
        found = [one.outputs.embedding for one in llm.embed(asked, PoolingParams(normalize=False))]
        with pytest.raises(ValueError, match="generates no texts"):
            llm.generate("a")
        short = llm.embed({"prompt": asked[0]}, PoolingParams(dimensions=8))
        [by_ids] = llm.embed([[1, 2, 3]])
        for params, told in (
            (PoolingParams(dimensions=65), "dimensions must be from 1 to 64, not 65"),
            (PoolingParams(prompt_name="query"), "the checkpoint has none"),
        ):
            with pytest.raises(RequestError, match=told):
                llm.embed("a", params)
        with pytest.raises(RequestError, match="context length"):
            llm.embed(["a", "b" * 600])
        [cut] = llm.embed("b" * 600, PoolingParams(truncate_prompt_tokens=9))
    expected = expected_vectors(folder, asked, normalize=False)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    cropped = expected[0, :8] / np.linalg.norm(expected[0, :8])
    np.testing.assert_allclose(short[0].outputs.embedding, cropped, atol=1e-5)
    assert by_ids.prompt_token_ids == [1, 2, 3] and len(by_ids.outputs.embedding) == 64
    np.testing.assert_allclose(
        cut.outputs.embedding, expected_vectors(folder, ["b" * 9])[0], atol=1e-5
    )


def test_what_no_stage_could_read_is_refused_at_once(cache, in_process):
    folder = cache("Qwen3ForCausalLM")
    with LLM(str(folder), task="embed", **in_process) as llm:
        for wrong in (2.5, True, "2", np.int64(2)):
            with pytest.raises(RequestError, match="PoolingParams"):
                llm.embed("a", PoolingParams(dimensions=wrong))
        with pytest.raises(RequestError, match="PoolingParams"):
            llm.embed("a", PoolingParams(truncate_prompt_tokens=1.5))
        with pytest.raises(RequestError, match="PoolingParams"):
            llm.embed("a", PoolingParams(prompt_name=5))
        with pytest.raises(RequestError, match="one PoolingParams"):
            llm.embed("a", {"dimensions": 2})
        for prompt in ({"prompt": "a", "cache_salt": 5}, [[2**40]], {"prompt_token_ids": ["a"]}):
            with pytest.raises(RequestError):
                llm.embed(prompt)
        with pytest.raises(RequestError, match="lora_request"):
            llm.embed("a", lora_request=object())
        for wrong in ([5], [{"prompt": "b"}], 5):
            with pytest.raises(RequestError, match="are texts"):
                llm.score("a", wrong)
        given = [{"prompt_token_ids": ids} for ids in ((64, 25), np.array([64, 25]), [64, 25])]
        vectors = [one.outputs.embedding for one in llm.embed([*given, [64, 25]])]
        assert llm.embed("a", PoolingParams(task="embed", use_activation=False))
        assert llm.embed([]) == []
    assert vectors == [vectors[0]] * 4


def test_prompts_of_the_checkpoint_come_before_texts(cache, tmp_path, in_process):
    folder = embedding_model(cache, tmp_path / "model", "Qwen3ForCausalLM")
    with_modules(folder, prompts={"prompts": PROMPTS, "default_prompt_name": "query"})
    expected = expected_vectors(folder, [PROMPTS["query"] + "river", "river"], normalize=False)
    with LLM(str(folder), **in_process) as llm:
        found = [
            llm.embed("river", PoolingParams(prompt_name=name))[0].outputs.embedding
            for name in (None, "query", "document")
        ]
    np.testing.assert_allclose(found, expected[[0, 0, 1]], rtol=1e-4, atol=1e-4)


def test_a_model_without_a_head_generates_nothing(cache, tmp_path, capsys):
    folder = embedding_model(cache, tmp_path / "model", "LlamaForCausalLM")
    for command in (["generate", "hi"], ["chat"]):
        with pytest.raises(SystemExit) as ended:
            sys.exit(main([*command, "--model", str(folder)]))
        assert ended.value.code == 2 and "no head for logits" in capsys.readouterr().err


def test_a_generating_model_refuses_vectors(in_process):
    with LLM(**in_process) as llm, pytest.raises(ValueError, match="task='embed'"):
        llm.embed("a")


def test_what_makes_no_vectors_of_last_tokens_is_refused(cache, tmp_path, in_process):
    folder = tmp_path / "model"
    shutil.copytree(cache("Qwen3ForCausalLM"), folder)
    for kinds, pooling, told in (
        ((), {"pooling_mode_mean_tokens": True}, "pools by mean_tokens"),
        ((), {"pooling_mode": "cls"}, "pools by cls"),
        (("Dense",), None, "Dense is not supported"),
        (("Normalize", "Pooling"), None, "Transformer, Pooling, Normalize, Pooling, where"),
        (("Transformer",), None, "Transformer, Pooling, Transformer, where"),
    ):
        with_modules(folder, *kinds, pooling=pooling)
        with pytest.raises(ConfigurationError, match=told):  # before a stage loads anything
            check_model(Settings(model=str(folder)))
        with pytest.raises(ConfigurationError, match=told):
            LLM(str(folder), **in_process)
    with_modules(folder)
    modules = json.loads((folder / "modules.json").read_text())
    for path in ("../other", "/tmp"):
        modules[1]["path"] = path
        (folder / "modules.json").write_text(json.dumps(modules))
        with pytest.raises(ConfigurationError, match="is not in the checkpoint"):
            check_model(Settings(model=str(folder)))
    (folder / "modules.json").write_text("[]")
    with pytest.raises(ConfigurationError, match="no module, where"):
        check_model(Settings(model=str(folder)))
