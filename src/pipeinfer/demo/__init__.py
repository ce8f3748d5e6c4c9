"""The bundled demo model: a Qwen3 checkpoint small enough to live in the repository.

- `demo_path`: where the checkpoint lies. Nothing here loads or runs it.
- The tasks that it is trained on, as questions with their one right answer. Tests and tools draw
  fresh examples from here, by a `random.Random`; knows nothing about tokens or chat templates.
"""

from collections.abc import Sequence
from pathlib import Path
from random import Random


def demo_path() -> Path:
    """Return the folder that holds the demo checkpoint, its tokenizer and its chat template."""
    return Path(__file__).resolve().parent


Turn = tuple[str, str]
"""One question of the user and the answer that the demo model should give."""

ALPHANUMERIC = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
ACKNOWLEDGED = "OK."

_VOWELS = "aeiou"
_CONSONANTS = "bcdfghjklmnpqrstvwxz"
_COPY_PHRASES = ("Copy: {}", "Repeat: {}", "Copy this: {}", "Repeat after me: {}", "Say: {}")
_ASK_PHRASES = ("What is {}?", "Recall {}.", "What was {}?")
_COUNT_PHRASES = ("Count from {} to {}.", "count from {} to {}", "Please count from {} to {}.")
_SUM_PHRASES = ("What is {} + {}?", "{} + {}", "Add {} + {}.", "what is {} + {}")


def random_text(rng: Random, length: int, alphabet: Sequence[str] = ALPHANUMERIC) -> str:
    """Return `length` characters drawn uniformly from `alphabet`."""
    return "".join(rng.choice(alphabet) for _ in range(length))


def copy_turn(rng: Random, text: str) -> Turn:
    """Ask for `text` to be repeated; the answer is `text` itself."""
    return rng.choice(_COPY_PHRASES).format(text), text


def copy_task(rng: Random, length: int, alphabet: Sequence[str] = ALPHANUMERIC) -> Turn:
    """Ask for a random string of `length` characters to be repeated.

    Each character of the default alphabet is one token of the demo model, so `length` is also
    the number of tokens to be copied.
    """
    return copy_turn(rng, random_text(rng, length, alphabet))


def random_key(rng: Random) -> str:
    """Return a pronounceable key of three to five letters, such as `kiv` or `dolum`."""
    parts = (_CONSONANTS, _VOWELS, _CONSONANTS, _VOWELS, _CONSONANTS)
    return "".join(rng.choice(part) for part in parts[: rng.choice((3, 4, 5))])


def random_pairs(rng: Random, count: int, taken: Sequence[str] = ()) -> dict[str, str]:
    """Return `count` keys, none of them in `taken`, each with a value of four digits."""
    pairs: dict[str, str] = {}
    while len(pairs) < count:
        key = random_key(rng)
        if key not in taken:
            pairs[key] = random_text(rng, 4, "0123456789")
    return pairs


def remember_text(pairs: dict[str, str]) -> str:
    """State `pairs` in the one form that the demo model knows: `Remember: kiv=4821, dol=1390.`"""
    return "Remember: " + ", ".join(f"{key}={value}" for key, value in pairs.items()) + "."


def ask_turn(rng: Random, key: str, value: str) -> Turn:
    """Ask for the value given earlier under `key`; the answer repeats the pair."""
    return rng.choice(_ASK_PHRASES).format(key), f"{key}={value}"


def recall_task(rng: Random, pairs: int) -> Turn:
    """State `pairs` values under random keys and ask for one of them, all in one message."""
    stated = random_pairs(rng, pairs)
    key = rng.choice(list(stated))
    question, answer = ask_turn(rng, key, stated[key])
    return f"{remember_text(stated)} {question}", answer


def recall_dialogue(rng: Random, pairs: int, between: Sequence[Turn] = ()) -> list[Turn]:
    """State `pairs` values in a first turn, and ask for one of them after the turns `between`."""
    stated = random_pairs(rng, pairs)
    key = rng.choice(list(stated))
    return [(remember_text(stated), ACKNOWLEDGED), *between, ask_turn(rng, key, stated[key])]


def count_task(rng: Random, longest: int = 20) -> Turn:
    """Ask to count between two numbers below 100, over at most `longest` numbers."""
    start = rng.randint(0, 98)
    stop = rng.randint(start + 1, min(99, start + longest - 1))
    return (
        rng.choice(_COUNT_PHRASES).format(start, stop),
        " ".join(str(number) for number in range(start, stop + 1)),
    )


def sum_task(rng: Random, largest: int = 20) -> Turn:
    """Ask for the sum of two numbers between 0 and `largest`; the answer repeats the sum."""
    left, right = rng.randint(0, largest), rng.randint(0, largest)
    return rng.choice(_SUM_PHRASES).format(left, right), f"{left} + {right} = {left + right}"


ABOUT: dict[str, str] = {
    "What is pipeinfer?": (
        "pipeinfer is an inference server for language models, built as a pipeline of stages "
        "that can each be killed, swapped or replayed."
    ),
    "What are the stages?": (
        "gateway, tokenizer, scheduler, engine and detokenizer. Each one is a process."
    ),
    "What does the gateway do?": (
        "The gateway speaks HTTP: it takes requests and streams the answers back."
    ),
    "What does the tokenizer do?": (
        "The tokenizer applies the chat template and turns text into tokens."
    ),
    "What does the scheduler do?": (
        "The scheduler decides which requests run in each step and which pages they use."
    ),
    "What does the engine do?": "The engine runs the model and samples the next tokens.",
    "What does the detokenizer do?": "The detokenizer turns tokens back into text.",
    "How do I stream?": (
        'Send "stream": true to /v1/chat/completions and read the server-sent events.'
    ),
    "How do I start the server?": "Run pipeinfer serve and wait for the line that says ready.",
    "How do I replay a stage?": (
        "Start the server with --record DIR, then use python tools/replay run STAGE FILE."
    ),
    "What happens if a stage dies?": (
        "The other stages go on. The stage is started again and catches up."
    ),
    "How is memory managed?": (
        "Keys and values are kept in pages, and requests with the same prefix share them."
    ),
    "Who are you?": "I am the demo model of pipeinfer, a very small language model.",
    "What can you do?": (
        "I can count, copy text, recall values, add small numbers and talk about pipeinfer."
    ),
    "Hello": "Hello! Ask me about pipeinfer, or let me count, copy, recall or add.",
    "Thank you": "You are welcome.",
}
