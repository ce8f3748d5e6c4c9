"""`pipeinfer generate PROMPT...`: completions of prompts on stdout, and the end.

Knows the offline classes only.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import aclosing

import msgspec

from pipeinfer.cli import flags
from pipeinfer.cli.flags import Asked
from pipeinfer.llm import LLM, AsyncLLM, PipelineStopped, RequestError, RequestOutput

MAX_TOKENS = 128


def run(arguments: Sequence[str]) -> int:
    """Prints the completions in the prompts' order; returns the exit code."""
    asked = flags.parse(parser(), arguments)
    prompts = _prompts(asked.options.prompts)
    try:
        if asked.options.stream:
            return asyncio.run(_stream(asked, prompts))
        return _whole(asked, prompts)
    except (RequestError, PipelineStopped) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def parser() -> argparse.ArgumentParser:
    """The words of the command line."""
    made = flags.parser("generate", f"Completes prompts; at most {MAX_TOKENS} tokens by default.")
    made.add_argument("prompts", nargs="+", metavar="PROMPT", help="a text; - reads lines")
    made.add_argument("--chat", action="store_true", default=False, help="use the chat template")
    how = made.add_mutually_exclusive_group()
    how.add_argument("--stream", action="store_true", default=False, help="print as it comes")
    how.add_argument("--json", action="store_true", default=False, help="one object per line")
    return made


def _prompts(given: Iterable[str]) -> list[str]:
    prompts = []
    for prompt in given:
        if prompt == "-":
            prompts += [line for line in sys.stdin.read().splitlines() if line]
        else:
            prompts.append(prompt)
    return prompts


def _whole(asked: Asked, prompts: list[str]) -> int:
    with LLM(**asked.settings) as llm:
        params = asked.params(llm.get_default_sampling_params().plain(), MAX_TOKENS)
        bar = len(prompts) > 1 and sys.stderr.isatty()
        if asked.options.chat:
            results = llm.chat([_chat(prompt) for prompt in prompts], params, bar)
        else:
            results = llm.generate(prompts, params, bar)
    for prompt, result in zip(prompts, results, strict=True):
        print(_line(prompt, result) if asked.options.json else result.outputs[0].text)
    errors = [result.outputs[0].error for result in results if result.outputs[0].error]
    for error in errors:
        print(f"error: {error}", file=sys.stderr)
    return 1 if errors else 0


async def _stream(asked: Asked, prompts: list[str]) -> int:
    async with AsyncLLM(**asked.settings) as llm:
        params = asked.params(llm.get_default_sampling_params().plain(), MAX_TOKENS)
        for prompt in prompts:
            if asked.options.chat:
                deltas = llm.chat(_chat(prompt), params)
            else:
                deltas = llm.generate(prompt, params)
            async with aclosing(deltas):
                error = await show(deltas)
            if error:
                print(f"error: {error}", file=sys.stderr)
                return 1
    return 0


async def show(deltas: AsyncIterator, said: list[str] | None = None) -> str:
    """Prints deltas as they come, and a newline; returns the error that ended them, or nothing."""
    error = ""
    async for delta in deltas:
        print(delta.text, end="", flush=True)
        if said is not None:
            said.append(delta.text)
        error = delta.error
    print(flush=True)
    return error


def _chat(prompt: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}]


def _line(prompt: str, result: RequestOutput) -> str:
    output = result.outputs[0]
    shown = {
        "prompt": prompt,
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
    }
    return msgspec.json.encode(shown).decode()
