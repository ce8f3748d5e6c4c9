"""Measures a demo checkpoint: the share of fresh examples that greedy decoding gets exactly right.

Uses transformers' own generation, so it knows nothing about pipeinfer's engine.
"""

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from demo_training.corpus import other_turn
from pipeinfer.demo import tasks

Dialogue = list[tasks.Turn]
ROWS = 25


def suites(rng: Random) -> dict[str, Callable[[], Dialogue]]:
    """Return what is measured; a dialogue's last turn is the one that is asked for."""

    def copies(count: int) -> Dialogue:
        return [tasks.copy_task(rng, 40) for _ in range(count)]

    return {
        "copy 10": lambda: [tasks.copy_task(rng, 10)],
        "copy 40": lambda: copies(1),
        "copy 80": lambda: [tasks.copy_task(rng, 80)],
        "copy 40 after 500 tokens": lambda: copies(5),
        "copy 40 after 1000 tokens": lambda: copies(10),
        "copy 40 after 1800 tokens": lambda: copies(18),
        "recall 1 of 3": lambda: [tasks.recall_task(rng, 3)],
        "recall 1 of 8": lambda: [tasks.recall_task(rng, 8)],
        "recall 1 of 16": lambda: [tasks.recall_task(rng, 16)],
        "recall 1 of 8 over 200 tokens": lambda: tasks.recall_dialogue(rng, 8, copies(2)),
        "recall 1 of 8 over 500 tokens": lambda: tasks.recall_dialogue(rng, 8, copies(5)),
        "recall 1 of 8 over 1000 tokens": lambda: tasks.recall_dialogue(rng, 8, copies(10)),
        "count": lambda: [tasks.count_task(rng)],
        "sum": lambda: [tasks.sum_task(rng)],
        "about pipeinfer": lambda: [rng.choice(list(tasks.ABOUT.items()))],
        "unknown question": lambda: [other_turn(rng)],
    }


@torch.inference_mode()
def answers(model: Any, tokenizer: Any, dialogues: list[Dialogue]) -> list[str]:
    """Return the greedy answer to the last question of each dialogue."""
    prompts = []
    for dialogue in dialogues:
        messages = []
        for question, answer in dialogue:
            messages.append({"role": "user", "content": question})
            messages.append({"role": "assistant", "content": answer})
        prompts.append(
            tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
        )
    batch = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
    longest = max(len(dialogue[-1][1].encode("utf-8")) for dialogue in dialogues)
    ids = model.generate(**batch, max_new_tokens=longest + 2, do_sample=False)
    return tokenizer.batch_decode(ids[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)


def measure(folder: Path, examples: int, seed: int, show: int) -> None:
    """Print a line per suite, with up to `show` of its wrong answers below."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for name, example in suites(Random(seed)).items():
        wrong = []
        for begin in range(0, examples, ROWS):
            dialogues = [example() for _ in range(min(ROWS, examples - begin))]
            found = answers(model, tokenizer, dialogues)
            wrong += [
                (dialogue[-1], answer)
                for dialogue, answer in zip(dialogues, found, strict=True)
                if answer != dialogue[-1][1]
            ]
        print(f"{name:32} {examples - len(wrong)}/{examples}", flush=True)
        for (question, expected), answer in wrong[:show]:
            print(f"    {question!r}\n      expected {expected!r}\n      answered {answer!r}")
