"""Log-probs on their way to a client: entries become texts, and each token gets its offset.

What came in is kept, because a restarted scheduler must know it. Knows scores and tokens; where an
output ends is the stream's business.
"""

from __future__ import annotations

from pipeinfer.detokenizer.incremental import DecoderFactory, IncrementalDecoder
from pipeinfer.detokenizer.token_texts import TokenTexts
from pipeinfer.logprobs import NO_ID, OWN_WORDS, layout, size
from pipeinfer.messages import LogprobTexts
from pipeinfer.packing import pack_few, unpack_few
from pipeinfer.params import SamplingParams


class Side:
    """Of the output or of the prompt, if `most` (alternatives) is a number. `kept`: all scores so
    far. `letters`: of the text so far, by which tokens get their offsets."""

    __slots__ = ("_offsets", "_texts", "kept", "letters", "most", "score_size")

    def __init__(self, most: int | None, texts: TokenTexts) -> None:
        self.most = most
        self.score_size = size(most)
        self.kept = bytearray()
        self.letters = 0
        self._texts = texts
        self._offsets: list[int] = []

    def token(self, text: str) -> None:
        """The next token's text is certain now, as far as it is."""
        self._offsets.append(self.letters)
        self.letters += len(text)

    def shown(self, ids: bytes, raw: bytes, name_ids: bool = False) -> LogprobTexts | None:
        """Of tokens whose texts were told since this was asked last, and perhaps of more of them
        than are shown; None if there are none or nobody asked."""
        offsets, self._offsets = self._offsets, []
        if self.most is None or not ids:
            return None
        tokens, named, end = unpack_few(ids), list[int](), OWN_WORDS + self.most
        raw = raw[: len(tokens) * self.score_size]
        for token, words in zip(tokens, layout(self.most).iter_unpack(raw), strict=True):
            named.append(token)
            # A token that nothing comes before has no rank, and no alternatives.
            named += words[OWN_WORDS:end] if words[1] else [NO_ID] * self.most
        texts = tuple(map(self._texts.__getitem__, named))
        shown = pack_few(offsets[: len(tokens)])
        return LogprobTexts(scores=raw, texts=texts, offsets=shown, ids=ids if name_ids else b"")


class Scores:
    """Of one request that asks for any."""

    __slots__ = ("_decoder", "output", "prompt")

    def __init__(self, params: SamplingParams, decoders: DecoderFactory) -> None:
        self.output = Side(params.logprobs, decoders.texts)
        self.prompt = Side(params.prompt_logprobs, decoders.texts)
        self._decoder: IncrementalDecoder = decoders.open((), params.skip_special_tokens)

    @property
    def scored(self) -> int:
        """Prompt tokens so far."""
        return len(self.prompt.kept) // self.prompt.score_size if self.prompt.score_size else 0

    def score(self, ids: bytes, raw: bytes) -> LogprobTexts | None:
        """More of the prompt's tokens."""
        for token in unpack_few(ids):
            self.prompt.token(self._decoder.step(token))
        self.prompt.kept += raw
        return self.prompt.shown(ids, raw, name_ids=True)


def scores_of(params: SamplingParams, decoders: DecoderFactory) -> Scores | None:
    """For a request with these parameters; None if it asks for no log-probs."""
    asked = params.logprobs is not None or params.prompt_logprobs is not None
    return Scores(params, decoders) if asked else None
