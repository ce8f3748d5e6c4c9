"""Over HTTP the model remembers what was said, whoever dies meanwhile.

A real model shows what made-up ones cannot: that what it says has to do with what it was told.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from functools import partial

import httpx
import openai
from smollm2_prompts import CONVERSATIONS, NAME, REMEMBERED, TURN_TOKENS

from servers import Server

Disturb = Callable[[], None]


def nothing() -> None: ...


def answer(api: openai.OpenAI, messages: list, disturb: Disturb) -> str:
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
    api: openai.OpenAI, turns: tuple[str, ...], disturb: dict[int, Disturb], cut: int | None = None
) -> list[str]:
    """The answers; disturb: what hits which of them. cut: which stream that breaks, so the answer
    is asked for again."""
    messages: list = []
    for turn, question in enumerate(turns):
        messages.append({"role": "user", "content": question})
        hit = disturb.get(turn, nothing)
        if turn == cut:
            with contextlib.suppress(openai.APIError, httpx.TransportError):
                answer(api, messages, hit)  # all of it may have been on its way
            hit = nothing
        messages.append({"role": "assistant", "content": answer(api, messages, hit)})
    return [message["content"] for message in messages[1::2]]


def remembers(answers: list[str], number: int) -> bool:
    """The second answer has a word that its question has not."""
    return REMEMBERED[number] in answers[1] and REMEMBERED[number] not in CONVERSATIONS[number][1]


def test_later_answers_know_what_was_said_before(api, expected):
    answers = talk(api, CONVERSATIONS[1][:2], {})
    assert answers == expected["conversations"][1][:2] and remembers(answers, 1)


def test_conversation_survives_the_loss_of_stages(server, api, expected):
    """kill -9 of the engine under the second answer, and of the gateway under the third: the
    answers are still those of transformers. That texts outlive the other stages,
    tests/pipeline/test_stage_loss.py shows with the demo model.

    Connections end with the gateway; whoever asks again is answered by the next one.
    """
    victims = {stage: server.pid(stage) for stage in ("engine", "gateway")}
    disturb = {
        turn: partial(os.kill, victim, signal.SIGKILL)
        for turn, victim in enumerate(victims.values(), 1)
    }
    answers = talk(api, CONVERSATIONS[0], disturb, cut=2)
    assert answers == expected["conversations"][0] and remembers(answers, 0)
    for stage, victim in victims.items():
        server.wait(partial(back, server, stage, victim), f"another {stage} is ready")


def back(server: Server, stage: str, victim: int) -> bool:
    return server.pid(stage) != victim and server.health()["status"] == "ready"
