"""What the tests ask the model, and its adapter. Knows no engine and no tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

NAME = "smollm2"  # of the model, over HTTP

PLACES = (
    "France", "Japan", "Egypt", "Canada", "Brazil", "India", "Kenya", "Norway", "Peru", "Greece",
)  # fmt: skip
THINGS = (
    "a bicycle", "a volcano", "the moon", "bread", "a violin", "the heart", "a whale", "glass",
    "a compass", "rain",
)  # fmt: skip
BEGINNINGS = (
    "Once upon a time, in a village by the sea,",
    "The three most important inventions of the last century are",
    "To make a cup of tea, first",
    "Dear Sir or Madam,\n\nI am writing to",
    "def fibonacci(n):\n    ",
    "Roses are red,\nviolets are blue,\n",
    "Water boils at a temperature of",
    "The difference between a crocodile and an alligator is",
    "In 1969, the first human being",
    "Ingredients:\n- 2 eggs\n- 200 g of flour\n-",
)
PROMPTS = (
    *(f"The capital of {place} is" for place in PLACES),
    *(f"In simple words, {thing} is" for thing in THINGS),
    *(f"Here is a short story about {thing}.\n\n" for thing in THINGS),
    *(f"The best time of the year to travel to {place} is" for place in PLACES),
    *BEGINNINGS,
)
TOKENS = 24  # of each answer

ADAPTER = Path(__file__).with_name("adapter")  # trained by trained_adapter.py
ADAPTER_TEXTS = Path(__file__).with_name("adapter_texts.json")
ASKED = PROMPTS[::5]  # with the adapter and without


def stored_adapter_texts() -> list[str]:
    """Greedy texts of ASKED with the adapter, as PEFT gave them."""
    return json.loads(ADAPTER_TEXTS.read_text())


# Later questions mean nothing without what came before.
CONVERSATIONS = (
    (
        "My name is Alice and I am a baker. Write one sentence about me.",
        "Write one more sentence about me.",
        "What is my job?",
    ),
    (
        "What is the capital of France?",
        "Which river flows through it?",
        "Which country is it in?",
    ),
)
REMEMBERED = ("baker", "Paris")  # in the second answers
TURN_TOKENS = 16

HAY = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
HAY_TIMES = 12  # on either side of the needle; 22 tokens each


def needle(key: int) -> str:
    """About 580 tokens with a number in the middle, and the question for it."""
    found = f"\n\nThe pass key is {key}. Remember it. {key} is the pass key.\n\n"
    asked = "\n\nWhat is the pass key? The pass key is"
    return HAY * HAY_TIMES + found + HAY * HAY_TIMES + asked
