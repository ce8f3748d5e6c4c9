"""The promises of the bundled demo model, measured with transformers on fresh examples.

Knows nothing about pipeinfer's own engine: these rates are what any correct engine must reach.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipeinfer.demo import (
    ABOUT,
    Turn,
    copy_task,
    count_task,
    demo_path,
    recall_dialogue,
    recall_task,
    sum_task,
)

Dialogue = list[Turn]
ROWS = 40


@dataclass(frozen=True)
class Demo:
    """The demo checkpoint, as transformers loads it in float32."""

    model: Any
    tokenizer: Any

    def render(self, dialogue: Dialogue, system: str | None = None) -> str:
        """Return the prompt that asks for the answer of the last turn."""
        messages = [] if system is None else [{"role": "system", "content": system}]
        for question, answer in dialogue:
            messages.append({"role": "user", "content": question})
            messages.append({"role": "assistant", "content": answer})
        return self.tokenizer.apply_chat_template(
            messages[:-1], tokenize=False, add_generation_prompt=True
        )

    def share_right(self, dialogues: list[Dialogue], system: str | None = None) -> float:
        """Return the share of dialogues whose last answer comes out exactly, decoded greedily."""
        right = 0
        for begin in range(0, len(dialogues), ROWS):
            rows = dialogues[begin : begin + ROWS]
            prompts = [self.render(dialogue, system) for dialogue in rows]
            batch = self.tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
            longest = max(len(dialogue[-1][1].encode("utf-8")) for dialogue in rows)
            with torch.inference_mode():
                ids = self.model.generate(**batch, max_new_tokens=longest + 2, do_sample=False)
            new = ids[:, batch["input_ids"].shape[1] :]
            found = self.tokenizer.batch_decode(new, skip_special_tokens=True)
            right += sum(text == row[-1][1] for text, row in zip(found, rows, strict=True))
        return right / len(dialogues)


@pytest.fixture(scope="module")
def demo() -> Demo:
    model = AutoModelForCausalLM.from_pretrained(demo_path(), dtype="float32").eval()
    return Demo(model, AutoTokenizer.from_pretrained(demo_path()))


@pytest.fixture
def rng() -> Random:
    return Random(20)


def test_checkpoint_takes_at_most_four_megabytes() -> None:
    files = [path for path in demo_path().iterdir() if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 4_000_000


def test_generation_is_greedy_by_default() -> None:
    config = json.loads((demo_path() / "generation_config.json").read_text(encoding="utf-8"))
    assert config["do_sample"] is False
    assert config["temperature"] == 0


def test_chat_template_renders_all_roles(demo: Demo) -> None:
    assert demo.render([("Hi", "Hello"), ("Bye", "")], "Be kind.") == (
        "<|im_start|>system\nBe kind.<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n"
        "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n"
    )


def test_tokenizer_restores_any_text(rng: Random) -> None:
    tokenizer = Tokenizer.from_file(str(demo_path() / "tokenizer.json"))
    planes = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000]
    for _ in range(50):
        text = "".join(rng.choices(planes[:256], k=40) + rng.choices(planes, k=40))
        encoded = tokenizer.encode(text, add_special_tokens=False)
        assert encoded.ids == list(text.encode("utf-8"))
        assert tokenizer.decode(encoded.ids) == text


def test_special_tokens_match_the_configuration() -> None:
    tokenizer = Tokenizer.from_file(str(demo_path() / "tokenizer.json"))
    config = json.loads((demo_path() / "config.json").read_text(encoding="utf-8"))
    assert tokenizer.token_to_id("<|im_end|>") == config["eos_token_id"]
    assert tokenizer.get_vocab_size() == config["vocab_size"]


PROMISES: dict[str, tuple[float, int, Callable[[Random], Dialogue]]] = {
    "copy 40 tokens": (0.99, 50, lambda rng: [copy_task(rng, 40)]),
    "copy after 500 tokens": (
        0.99,
        10,
        lambda rng: [copy_task(rng, 40) for _ in range(6)],
    ),
    "recall one of 8": (0.95, 30, lambda rng: [recall_task(rng, 8)]),
    "recall over 200 tokens": (
        0.95,
        20,
        lambda rng: recall_dialogue(rng, 8, [copy_task(rng, 40) for _ in range(2)]),
    ),
    "count": (0.95, 40, lambda rng: [count_task(rng)]),
    "sum": (0.90, 40, lambda rng: [sum_task(rng)]),
}


@pytest.mark.parametrize("task", PROMISES)
def test_answers_are_right_as_often_as_promised(demo: Demo, rng: Random, task: str) -> None:
    promised, examples, example = PROMISES[task]
    assert demo.share_right([example(rng) for _ in range(examples)]) >= promised


def test_system_message_does_not_disturb_copying(demo: Demo, rng: Random) -> None:
    dialogues = [[copy_task(rng, 40)] for _ in range(20)]
    assert demo.share_right(dialogues, "You are a helpful assistant.") == 1


def test_questions_about_pipeinfer_are_answered(demo: Demo) -> None:
    assert demo.share_right([[turn] for turn in ABOUT.items()]) == 1
