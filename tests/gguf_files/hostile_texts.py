"""Texts that tell tokenizers apart: all planes of Unicode, long runs, code, control tokens."""

# ruff: noqa: RUF001
from __future__ import annotations

import random
import unicodedata
from collections.abc import Sequence

FIXED = (
    "",
    " ",
    "\0",
    "a\0b\0\0c",
    "\ufeffbom",
    "\ufffd\ufffd lone \ufffd",
    "\ue000 private \U000f0000\U0010ffff",
    "x" * 3000,
    "ab" * 1500,
    "字" * 700,
    " " * 301,
    "\n" * 97,
    "\t" * 65,
    "\r\n" * 40,
    " \n \t \r\n  \n\n   x",
    "don't DON'T we'Ll I'M 'tis y'all'd've 'ſ 'S",
    "٠١٢ ¼½ Ⅷ ²³ 1234567890 3.14e-10 0xDEADBEEF १२३",
    "👩‍👩‍👧‍👦 👍🏽 🏳️‍🌈 🇩🇪🇫🇷 ☝️ 5️⃣",
    "e\u0301 o\u0308 \u1100\u1161\u11a8 Z\u0351\u036b\u0343 \u0344",
    "שלום עולם مرحبا بالعالم \u202etxet\u202c \u200f\u200e",
    "def f(x):\n\treturn {k: v for k, v in x.items()}  # ok\n\n\nclass A: pass\n",
    "<0x0A><0x00> ▁▁ ▁ \u2581a Ġ Ċ ĠĠ <unk> [UNK] <s></s>",
    "\u00a0\u2003\u3000\u200b\u0085\u001c\u001f\u180e\u2028\u2029x",
    "ＨＴＴＰＳｅｒｖｅｒ １２３ ，。「」 ﬁ ǅ ʼn İi ß ẞ ΑΣ σς",
    "Ünïcödé\u0300\u0301 naïve café",
)
CONTROLS = (
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<bos>",
    "<eos>",
    "<unk>",
    "<s>",
    "</s>",
    "<|im_sta",
    "im_end|>",
    "<unused1>",
    "<0x41>",
)
SPACES = (" ", "  ", "\n", "\n\n", "\t", "\r\n", "\r", "\u00a0", "\u3000", "\u200b", "\v", "\x85")
WORDS = (
    "the", "Hello", "World", "HTTPServer", "camelCase", "snake_case", "it's", "WE'LL", "I'd",
    "2024", "3.14", "1,000,000", "foo()", "==", "!=", "{}", "...", "—", "¿Qué?", "été", "Größe",
    "日本語", "한국어", "русский", "العربية", "हिन्दी", "ภาษาไทย", "👩‍💻", "🇯🇵",
    "e\u0301", "▁", "<0x0A>",
    "http://a.b/c?d=e&f", "/usr/bin", "C:\\x", "#include", "//", "ſ", "ǅ", "Ⅳ", "½",
)  # fmt: skip
RANGES = (
    (0x00, 0x7F), (0x80, 0x24F), (0x300, 0x36F), (0x370, 0x58F), (0x590, 0x8FF), (0x900, 0x1FFF),
    (0x2000, 0x2FFF), (0x3000, 0x9FFF), (0xA000, 0xD7FF), (0xE000, 0xFFFF), (0x10000, 0x1FFFF),
    (0x20000, 0x3FFFF), (0xE0000, 0xE01FF), (0xF0000, 0x10FFFF),
)  # fmt: skip


def hostile_texts(count: int, seed: int = 0, controls: Sequence[str] = CONTROLS) -> list[str]:
    """The fixed texts, and random ones up to `count`; the same ones for the same seed."""
    chance = random.Random(seed)
    makers = (_planes, _mixed, _runs, _ascii)
    texts = list(FIXED)
    while len(texts) < count:
        text = chance.choice(makers)(chance, controls)
        texts.append(unicodedata.normalize("NFD", text) if chance.random() < 0.05 else text)
    return texts[:count]


def _planes(chance: random.Random, controls: Sequence[str]) -> str:
    del controls
    ranges = chance.choices(RANGES, k=chance.randint(1, 3))
    return "".join(
        chr(chance.randint(*chance.choice(ranges))) for _ in range(chance.randint(1, 30))
    )


def _mixed(chance: random.Random, controls: Sequence[str]) -> str:
    parts = []
    for _ in range(chance.randint(1, 20)):
        kind = chance.random()
        if kind < 0.6:
            parts.append(chance.choice(WORDS))
        elif kind < 0.9:
            parts.append(chance.choice(SPACES))
        else:
            parts.append(chance.choice(controls))
        if chance.random() < 0.5:
            parts.append(" ")
    return "".join(parts)


def _runs(chance: random.Random, controls: Sequence[str]) -> str:
    pieces = (*SPACES, *WORDS, *controls, "a", "=", "-", "0", "é", "\0")
    return "".join(
        chance.choice(pieces) * chance.choice((1, 2, 3, 7, 30, 70))
        for _ in range(chance.randint(1, 4))
    )


def _ascii(chance: random.Random, controls: Sequence[str]) -> str:
    del controls
    letters = "abcdefghijklmnopqrstuvwxyzABCXYZ0123456789 \n\t'\"<>|_-=+(){}[].,:;!?/\\@#$%^&*~`"
    return "".join(chance.choice(letters) for _ in range(chance.randint(1, 80)))
