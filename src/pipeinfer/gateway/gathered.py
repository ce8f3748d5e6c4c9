"""One choice of an answer as its deltas come in: what it may show, and what of it is shown.

Knows deltas and the shapes of log-probs; not whether the answer is sent whole or in chunks.
"""

from __future__ import annotations

import msgspec

from pipeinfer.gateway import logprob_shapes
from pipeinfer.gateway.events import Delta, Started
from pipeinfer.gateway.shapes import Answer, Choice
from pipeinfer.gateway.token_scores import prompt_scores, token_scores
from pipeinfer.json_values import JsonObject, JsonValue
from pipeinfer.messages import FinishReason, LogprobTexts

Scored = tuple[LogprobTexts, bytes]  # with the tokens' ids


def kept(answer: Answer, delta: Delta) -> Delta:
    """What of `delta` its client asked for; where nothing new is, one token was sampled."""
    if not answer.shown.nothing_new:
        return delta
    end = "length" if delta.finish == "stop" else delta.finish
    return msgspec.structs.replace(
        delta, text="", ids=b"", finish=end, stop_reason=None, output_tokens=0, logprobs=None
    )


class Gathered:
    """Of one choice. `prompt_text`: what is echoed."""

    __slots__ = ("_answer", "_prompt", "_scored", "_texts", "prompt_text")

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._texts: list[str] = []
        self._scored: list[Scored] = []
        self._prompt: list[LogprobTexts] = []
        self.prompt_text = ""

    def started(self, started: Started) -> None:
        """Comes first."""
        self.prompt_text = started.prompt_text

    def delta(self, delta: Delta) -> None:
        """Keeps all of it."""
        self._texts.append(delta.text)
        if delta.logprobs is not None:
            self._scored.append((delta.logprobs, delta.ids))
        self.prompt(delta)

    def prompt(self, delta: Delta) -> None:
        """Keeps what it says of the prompt."""
        if delta.prompt is not None:
            self._prompt.append(delta.prompt)

    def echoed(self) -> JsonObject | None:
        """`logprobs` of the prompt that is echoed."""
        most = self._answer.shown.logprobs
        if most is None or not self._answer.shown.echo:
            return None
        return logprob_shapes.of_completion(prompt_scores(self._prompt), most)

    def prompt_logprobs(self) -> list[JsonValue] | None:
        """vLLM's, if asked for."""
        most = self._answer.shown.prompt_logprobs
        return None if most is None else logprob_shapes.of_prompt(prompt_scores(self._prompt), most)

    def chunk(self, delta: Delta) -> JsonObject | None:
        """`logprobs` of the tokens in this delta alone."""
        return None if delta.logprobs is None else self._logprobs([(delta.logprobs, delta.ids)])

    def _logprobs(self, scored: list[Scored]) -> JsonObject | None:
        most = self._answer.shown.logprobs
        if most is None:
            return None
        scores = token_scores(scored)
        if self._answer.chat:
            return logprob_shapes.of_chat(scores)
        return logprob_shapes.of_completion(scores, most, len(self.prompt_text))

    def whole(self, finish: FinishReason, stop_reason: str | int | None) -> Choice:
        """The choice, of all that was kept."""
        text = self.prompt_text + "".join(self._texts)
        logprobs, echoed = self._logprobs(self._scored), self.echoed()
        if logprobs is not None and echoed is not None:
            logprobs = _joined(echoed, logprobs)
        return Choice(text, finish, stop_reason, logprobs, self.prompt_logprobs())


def _joined(first: JsonObject, second: JsonObject) -> JsonObject:
    """Two of completions', list by list."""
    joined: JsonObject = {}
    for name, values in first.items():
        more = second[name]
        assert isinstance(values, list) and isinstance(more, list)
        joined[name] = values + more
    return joined
