"""A GGUF file in the place of a folder: the same answers, in one process and in every rank. One
is served over HTTP to the tests of smollm2/."""

from __future__ import annotations

from pathlib import Path

import pytest

import checkpoints
import gguf_writing
from pipeinfer import LLM, SamplingParams
from pipeinfer.trace.recorder import identify_model

QUESTIONS = ("What is it?", "abc abc abc", "Zürich, 東京!")
PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
FIELDS = {"Gemma3ForCausalLM": {"query_pre_attn_scalar": 16}}


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """architecture -> (folder, file), each written once."""
    made: dict[str, tuple[Path, Path]] = {}

    def pair(architecture: str) -> tuple[Path, Path]:
        if architecture not in made:
            folder = tmp_path_factory.mktemp(architecture)
            checkpoints.make_checkpoint(folder, architecture, **FIELDS.get(architecture, {}))
            made[architecture] = folder, gguf_writing.write_gguf(folder, folder / "model.gguf")
        return made[architecture]

    return pair


HERE = {"in_process": True}  # no other process has to load torch; ranks are processes


def answers(model: Path, **settings: object) -> list[tuple[list[int], list[int]]]:
    with LLM(str(model), kv_pages=200, **settings) as llm:
        chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
        done = llm.chat(chats, PARAMS, use_tqdm=False)
        tokenizer = llm.get_tokenizer()
        for chat, out in zip(chats, done, strict=True):
            text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            assert (text, tokenizer.encode(text)) == (out.prompt, out.prompt_token_ids)
            assert (
                tokenizer.decode(out.outputs[0].token_ids, skip_special_tokens=True)
                == out.outputs[0].text
            )
        return [(out.prompt_token_ids, out.outputs[0].token_ids) for out in done]


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Gemma3ForCausalLM"])
def test_answers_and_the_tokenizer_are_those_of_the_folder(both, architecture):
    folder, file = both(architecture)
    assert answers(file, **HERE) == answers(folder, **HERE)


def test_two_ranks_answer_as_one(both):
    folder, file = both("Qwen3ForCausalLM")
    assert answers(file, tp=2) == answers(folder, **HERE)


def test_recordings_know_which_file_it_was(both):
    first, second = both("LlamaForCausalLM")[1], both("Qwen3ForCausalLM")[1]
    digests = {identify_model("m", str(path)).digest for path in (first, second, first)}
    assert len(digests) == 2 and "" not in digests
