"""One choice of an answer as its deltas come in: text, and what is shown beside it.

Knows deltas and the shapes of log-probs; not whether the answer is sent whole or in chunks.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pipeinfer.gateway.events import Delta, Started
from pipeinfer.gateway.logprob_shapes import ChatLogprobs, CompletionLogprobs, PromptLogprobs
from pipeinfer.gateway.pieces import ChoiceParser, ParsedDelta
from pipeinfer.gateway.shapes import NULL, FinishedChoice, ParsedOutput, ResponseMetadata
from pipeinfer.gateway.token_scores import TokenScore, prompt_scores, token_scores
from pipeinfer.messages import FinishReason
from pipeinfer.packing import unpack

_json = msgspec.json.Encoder()


def requested_part(answer: ResponseMetadata, delta: Delta) -> Delta:
    """What of `delta` its client asked for; where nothing new is, one token was sampled."""
    if not answer.output_options.no_new_tokens:
        return delta
    end = "length" if delta.finish == "stop" else delta.finish
    return msgspec.structs.replace(
        delta, text="", ids=b"", finish=end, stop_reason=None, output_tokens=0, logprobs=None
    )


class ChoiceCollector:
    """Of one choice. `prompt_text`: what is echoed, before all else. `prompt_ids`: of the prompt,
    if ids are asked for."""

    __slots__ = (
        "_chat",
        "_completion",
        "_echo",
        "_ids",
        "_parsed",
        "_parser",
        "_parser_factory",
        "_prompt",
        "_texts",
        "prompt_ids",
        "prompt_text",
    )

    def __init__(self, answer: ResponseMetadata) -> None:
        shown = answer.output_options
        most, of_prompt = shown.logprobs, shown.prompt_logprobs
        self._chat = ChatLogprobs() if answer.chat and most is not None else None
        self._completion: CompletionLogprobs | None = None
        if most is not None and not answer.chat:
            self._completion = CompletionLogprobs(most)
        self._prompt = None if of_prompt is None else PromptLogprobs(of_prompt)
        self._echo = shown.echo
        self._texts: list[str] = []
        self._parser_factory = answer.parser_factory
        self._parser: ChoiceParser | None = None
        self._parsed = ParsedOutput()
        self._ids: list[int] | None = [] if shown.token_ids else None
        self.prompt_text = ""
        self.prompt_ids: list[int] | None = None

    def started(self, started: Started) -> None:
        """Comes first."""
        self.prompt_text = started.prompt_text
        if self._parser_factory is not None:
            self._parser = self._parser_factory(started.thoughts)
        if self._ids is not None:
            self.prompt_ids = unpack(started.prompt_ids).tolist()

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of thoughts so far, as far as is certain."""
        return 0 if self._parser is None else self._parser.reasoning.count

    def add(self, delta: Delta) -> None:
        """Keeps all of it."""
        self._texts.append(delta.text)
        if self._parser is not None:
            self._parser.reasoning.add_offsets(delta.offsets)
        if self._ids is not None:
            self._ids += unpack(delta.ids).tolist()
        self.add_logprobs(delta)

    def add_logprobs(self, delta: Delta) -> None:
        """Keeps its log-probs, those of the prompt as well."""
        if delta.prompt is not None:
            of_prompt = list(prompt_scores([delta.prompt]))
            if self._prompt is not None:
                self._prompt.add(of_prompt)
            if self._completion is not None and self._echo:
                self._completion.add(of_prompt)
        if delta.logprobs is not None:
            self._add(list(token_scores([(delta.logprobs, delta.ids)])))

    def _add(self, scores: list[TokenScore]) -> None:
        if self._chat is not None:
            self._chat.add(scores)
        if self._completion is not None:
            self._completion.add(scores, len(self.prompt_text))

    def parse(self, delta: Delta) -> Sequence[ParsedDelta]:
        """Those that are certain now; none of a choice that is not read."""
        if self._parser is None:
            return ()
        self._parser.reasoning.add_offsets(delta.offsets)
        deltas = [*self._parser.feed(delta.text)]
        if delta.finish is not None:
            deltas += self._parser.finish()
        self._parsed.add(deltas)
        return deltas

    def finished_choice(self, delta: Delta, logprobs: bytes) -> FinishedChoice:
        """The end of a choice whose pieces were sent."""
        assert delta.finish is not None
        return FinishedChoice("", delta.finish, delta.stop_reason, logprobs, parsed=self._parsed)

    def take_logprobs(self) -> bytes:
        """`logprobs` of all tokens since it was asked last, as JSON; null if nobody wants any."""
        logprobs = self._completion if self._chat is None else self._chat
        return NULL if logprobs is None else logprobs.take()

    def with_token_ids(self, logprobs: bytes, delta: Delta, first: bool) -> bytes:
        """What stands in a choice's chunk behind the name `logprobs`: these, then the ids that came
        with it; of a completion the `first` has those of the prompt."""
        if self._ids is None:
            return logprobs
        fields = b'%s,"token_ids":%s' % (logprobs, _json.encode(unpack(delta.ids).tolist()))
        if first and self.prompt_ids is not None:
            fields += b',"prompt_token_ids":%s' % _json.encode(self.prompt_ids)
        return fields

    def full_choice(self, finish: FinishReason, stop_reason: str | int | None) -> FinishedChoice:
        """The choice, of all that was kept."""
        text = self.prompt_text + "".join(self._texts)
        of_prompt = None if self._prompt is None else self._prompt.take()
        parsed = None
        if self._parser is not None:
            parsed = ParsedOutput()
            parsed.add((*self._parser.feed(text), *self._parser.finish()))
        return FinishedChoice(
            text,
            finish,
            stop_reason,
            self.take_logprobs(),
            of_prompt,
            parsed,
            self._ids,
            self.prompt_ids,
        )
