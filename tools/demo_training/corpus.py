"""The demo model's training text: conversations made of the tasks, as token ids and labels.

Knows the tokenizer's ids and the chat template's form; knows nothing about the model.
"""

from dataclasses import dataclass, field
from random import Random

import torch
from torch import Tensor

from demo_training.checkpoint import END, START
from pipeinfer.demo import tasks

IGNORED = -100
SYSTEM_MESSAGES = (
    "You are a helpful assistant.",
    "You are the demo model of pipeinfer.",
    "Answer briefly.",
    "Be kind and precise.",
)
PARAPHRASES: dict[str, tuple[str, ...]] = {
    "What is pipeinfer?": ("what is pipeinfer", "Tell me about pipeinfer.", "Explain pipeinfer."),
    "What are the stages?": (
        "what are the stages of pipeinfer?",
        "Which stages are there?",
        "Name the stages.",
    ),
    "What does the gateway do?": ("What is the gateway?", "what does the gateway do"),
    "What does the tokenizer do?": ("What is the tokenizer?", "what does the tokenizer do"),
    "What does the scheduler do?": ("What is the scheduler?", "what does the scheduler do"),
    "What does the engine do?": ("What is the engine?", "what does the engine do"),
    "What does the detokenizer do?": ("What is the detokenizer?", "what does the detokenizer do"),
    "How do I stream?": ("how do I stream", "How can I stream an answer?", "What is streaming?"),
    "How do I start the server?": ("How do I start pipeinfer?", "how do I run pipeinfer?"),
    "How do I replay a stage?": ("how do I replay", "How does replay work?", "What is replay?"),
    "What happens if a stage dies?": (
        "Can I kill a stage?",
        "What if the engine dies?",
        "What happens when a stage crashes?",
    ),
    "How is memory managed?": ("What are pages?", "how does the cache work?", "What is a page?"),
    "Who are you?": ("who are you", "What are you?", "What model are you?"),
    "What can you do?": ("what can you do", "Help", "help", "What do you know?"),
    "Hello": ("hello", "Hi", "hi", "Hello!", "Hi!", "Hey", "Hello there", "Good morning"),
    "Thank you": ("thank you", "Thanks", "thanks", "Thank you!", "Thanks!"),
}
# Everything else gets one honest answer, so that a stranger's question does not yield nonsense.
OTHER_ANSWER = "I am too small to know that. Ask me what I can do."
OTHER_QUESTIONS = (
    "What is the capital of {}?", "Tell me a story about {}.", "Write a poem about {}.",
    "Who was {}?", "Why is {} so important?", "How does {} work?", "Explain {} to me.",
    "Translate {} into French.", "Where is {}?", "Do you like {}?", "How old is {}?",
    "Write a function for {}.", "Tell me a joke about {}.", "When did {} begin?",
)  # fmt: skip
OTHER_SUBJECTS = (
    "France", "Germany", "Japan", "the sky", "the moon", "love", "music", "mathematics", "water",
    "Albert Einstein", "Mozart", "the Roman Empire", "a cat", "a dragon", "the sea", "history",
    "gravity", "a quicksort", "the weather", "New York", "the internet", "chess", "a rainbow",
    "photosynthesis", "the sun", "coffee", "a robot", "Shakespeare", "the future", "this",
)  # fmt: skip
WORDS = sorted({word for text in (*tasks.ABOUT, *tasks.ABOUT.values()) for word in text.split()})
LOWERCASE, DIGITS = "abcdefghijklmnopqrstuvwxyz", "0123456789"
PRINTABLE = [chr(code) for code in range(0x21, 0x7F)]
UNICODE = [chr(code) for code in (*range(0xC0, 0x180), *range(0x391, 0x3CA), *range(0x410, 0x450))]
UNICODE += [chr(code) for code in (*range(0x4E00, 0x4F00), *range(0x1F600, 0x1F640))]


def text_to_copy(rng: Random, longest: int) -> str:
    """Return a text of about `longest` bytes at most: letters and digits, at times anything."""
    length = rng.randint(1, longest)
    kind = rng.random()
    if kind < 0.55:
        return tasks.random_text(rng, length)
    if kind < 0.65:
        return tasks.random_text(rng, length, rng.choice((LOWERCASE, DIGITS)))
    if kind < 0.75:
        return tasks.random_text(rng, length, PRINTABLE)
    if kind < 0.83:
        return tasks.random_text(rng, max(1, length // 3), UNICODE)
    words = (
        rng.choice(WORDS) if rng.random() < 0.5 else tasks.random_key(rng)
        for _ in range(max(1, length // 6))
    )
    return " ".join(words)


def about_turn(rng: Random) -> tasks.Turn:
    """Return a question about pipeinfer in one of its forms, with its answer."""
    question = rng.choice(list(tasks.ABOUT))
    return rng.choice((question, *PARAPHRASES[question])), tasks.ABOUT[question]


def other_turn(rng: Random) -> tasks.Turn:
    """Return a question that the model cannot answer, with the answer that says so."""
    return rng.choice(OTHER_QUESTIONS).format(rng.choice(OTHER_SUBJECTS)), OTHER_ANSWER


@dataclass
class Conversation:
    """One conversation in the making, with the pairs that it has stated so far.

    `ease` in (0, 1] shortens copies and lists of pairs: the curriculum of the first steps.
    """

    rng: Random
    ease: float
    longest_copy: int
    known: dict[str, str] = field(default_factory=dict)

    def turn(self) -> tasks.Turn:
        """Return the next question and its answer."""
        rng = self.rng
        kind = rng.random()
        if kind < 0.34:
            longest = max(4, int(self.longest_copy * self.ease))
            return tasks.copy_turn(rng, text_to_copy(rng, longest))
        if kind < 0.64:
            return self.recall_turn()
        if kind < 0.71:
            return tasks.count_task(rng)
        if kind < 0.90:
            return tasks.sum_task(rng)
        return about_turn(rng) if kind < 0.98 else other_turn(rng)

    def recall_turn(self) -> tasks.Turn:
        """Ask for a pair stated before, or state new ones and perhaps ask for one of them."""
        rng = self.rng
        if self.known and rng.random() < 0.6:
            key = rng.choice(list(self.known))
            return tasks.ask_turn(rng, key, self.known[key])
        count = rng.randint(1, max(2, int(16 * self.ease)))
        pairs = tasks.random_pairs(rng, count, list(self.known))
        self.known |= pairs
        stated = tasks.remember_text(pairs)
        if rng.random() < 0.3:
            return stated, tasks.ACKNOWLEDGED
        key = rng.choice(list(pairs))
        question, answer = tasks.ask_turn(rng, key, pairs[key])
        return f"{stated} {question}", answer


def _bytes(text: str) -> list[int]:
    return list(text.encode("utf-8"))


def _message(role: str, content: str) -> list[int]:
    return [START, *_bytes(f"{role}\n{content}"), END, *_bytes("\n")]


def training_row(rng: Random, length: int, ease: float) -> tuple[list[int], list[int]]:
    """Return `length` tokens of one conversation and their labels: only answers are learnt."""
    tokens: list[int] = []
    if rng.random() < 0.25:
        tokens += _message("system", rng.choice((*SYSTEM_MESSAGES, text_to_copy(rng, 40))))
    labels = [IGNORED] * len(tokens)
    conversation = Conversation(rng, ease, min(120, length // 3))
    while len(tokens) < length:
        question, answer = conversation.turn()
        prompt = [*_message("user", question), START, *_bytes("assistant\n")]
        learnt = [*_bytes(answer), END]
        tokens += prompt + learnt + _bytes("\n")
        labels += [IGNORED] * len(prompt) + learnt + [IGNORED]
    return tokens[:length], labels[:length]


def batch(rng: Random, rows: int, length: int, ease: float) -> tuple[Tensor, Tensor]:
    """Return token ids and labels, both [rows, length] int64; unlearnt labels are `IGNORED`."""
    made = [training_row(rng, length, ease) for _ in range(rows)]
    return torch.tensor([row for row, _ in made]), torch.tensor([labels for _, labels in made])
