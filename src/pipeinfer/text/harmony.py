"""The special tokens of the harmony format, by which gpt-oss sets messages apart.

Knows no template and no answer.
"""

from __future__ import annotations

START, END, MESSAGE = "<|start|>", "<|end|>", "<|message|>"
CHANNEL, CONSTRAIN = "<|channel|>", "<|constrain|>"
RETURN, CALL = "<|return|>", "<|call|>"
# What ends an answer: its last message, or a call that waits for a result. END does not.
HARMONY_ENDS = (RETURN, CALL)
# Of a tokenizer that has the format; <|constrain|> some leave out.
HARMONY_TOKENS = frozenset((START, END, MESSAGE, CHANNEL, *HARMONY_ENDS))
