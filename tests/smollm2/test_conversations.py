"""Over HTTP the model remembers what was said, whoever dies meanwhile.

A real model shows what made-up ones cannot: that what it says has to do with what it was told.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable

import httpx
import openai
import pytest
from smollm2_prompts import CONVERSATIONS, NAME, REMEMBERED, TURN_TOKENS

from servers import Server

Disturb = Callable[[], None]


def answer(api: openai.OpenAI, messages: list, disturb: Disturb = lambda: None) -> str:
    """Streamed; `disturb` is called after the first letters."""
    text = ""
    for chunk in api.chat.completions.create(
        model=NAME, messages=messages, temperature=0, max_tokens=TURN_TOKENS, stream=True
    ):
        begun, text = bool(text), text + (chunk.choices[0].delta.content or "")
        if text and not begun:
            disturb()
    return text


def talk(
    api: openai.OpenAI, turns: tuple[str, ...], disturb: Disturb = lambda: None, cut: bool = False
) -> list[str]:
    """The answers; `disturb` hits the second. `cut`: that breaks its stream, so it is asked for
    again."""
    messages: list = []
    for turn, question in enumerate(turns):
        messages.append({"role": "user", "content": question})
        if turn == 1 and cut:
            with contextlib.suppress(openai.APIError, httpx.TransportError):
                answer(api, messages, disturb)  # all of it may have been on its way
        text = answer(api, messages, disturb if turn == 1 and not cut else lambda: None)
        messages.append({"role": "assistant", "content": text})
    return [message["content"] for message in messages[1::2]]


@pytest.mark.parametrize("number", range(len(CONVERSATIONS)))
def test_later_answers_know_what_was_said_before(api, expected, number):
    answers = talk(api, CONVERSATIONS[number])
    assert answers == expected["conversations"][number]
    assert REMEMBERED[number] in answers[1] and REMEMBERED[number] not in CONVERSATIONS[number][1]


@pytest.mark.parametrize("stage", ["engine", "gateway"])
def test_conversation_survives_the_loss_of(server, api, expected, stage):
    """kill -9 under the second answer: the answers are still those of transformers. That texts
    outlive the other stages, tests/pipeline/test_stage_loss.py shows with the demo model.

    Connections end with the gateway; whoever asks again is answered by the next one.
    """
    victim = server.pid(stage)
    answers = talk(
        api, CONVERSATIONS[0], lambda: os.kill(victim, signal.SIGKILL), cut=stage == "gateway"
    )
    assert answers == expected["conversations"][0]
    server.wait(lambda: back(server, stage, victim), f"another {stage} is ready")


def back(server: Server, stage: str, victim: int) -> bool:
    return server.pid(stage) != victim and server.health()["status"] == "ready"
