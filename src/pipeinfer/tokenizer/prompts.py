"""A request's prompt as token ids, and every reason to refuse it.

Text, chat and given ids end as the same thing: ids of the model's vocabulary that leave room for an
answer. Knows no stage and no channel.
"""

from __future__ import annotations

import numpy as np
from tokenizers import Tokenizer

from pipeinfer.messages import Submit, unpack
from pipeinfer.params import SamplingParams
from pipeinfer.tokenizer.templates import ChatTemplates, TemplateFailed


class Rejected(ValueError):
    """The client's mistake: an HTTP status, the parameter at fault and OpenAI's error code."""

    def __init__(self, message: str, param: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status = 400
        self.param = param
        self.code = code


class PromptEncoder:
    """Encodes prompts for one model."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        templates: ChatTemplates,
        vocab_size: int,
        max_model_len: int,
    ) -> None:
        """`tokenizer` None: only token ids are accepted. `max_model_len`: prompt plus output."""
        self._tokenizer = tokenizer
        self._templates = templates
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len

    def encode(self, submit: Submit) -> np.ndarray:
        """The prompt's ids, int32 [n], 0 < n < max_model_len. Raises Rejected."""
        param = "prompt" if submit.chat is None else "messages"
        if submit.chat is not None:
            # The template has written the special tokens already.
            ids = self._tokenize(self._render(submit), False, param)
        elif submit.text is not None:
            ids = self._tokenize(submit.text, submit.add_special_tokens, param)
        elif submit.prompt_ids is not None:
            ids = unpack(submit.prompt_ids)
        else:
            raise Rejected("the request has no prompt", param)
        if not len(ids):
            raise Rejected("the prompt is empty", param)
        self._check_vocabulary(ids, param)
        self._check_stop_tokens(submit.params.stop_token_ids)
        self._check_length(len(ids), submit.params, param)
        return ids

    def _render(self, submit: Submit) -> str:
        assert submit.chat is not None
        try:
            return self._templates.render(submit.chat, submit.template_arguments)
        except TemplateFailed as error:
            raise Rejected(str(error), "messages") from None

    def _tokenize(self, text: str, add_special_tokens: bool, param: str) -> np.ndarray:
        if self._tokenizer is None:
            raise Rejected(
                "the model has no tokenizer.json, so it takes prompts as token ids only", param
            )
        try:
            encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except Exception as error:  # the library raises bare Exception
            raise Rejected(f"the text cannot be tokenized: {error}", param) from None
        return np.asarray(encoding.ids, dtype="<i4")

    def _check_vocabulary(self, ids: np.ndarray, param: str) -> None:
        wrong = ids[(ids < 0) | (ids >= self._vocab_size)]
        if len(wrong):
            raise self._unknown_token(int(wrong[0]), param)

    def _check_stop_tokens(self, ids: tuple[int, ...]) -> None:
        for token in ids:
            if not 0 <= token < self._vocab_size:
                raise self._unknown_token(token, "stop_token_ids")

    def _unknown_token(self, token: int, param: str) -> Rejected:
        size = self._vocab_size
        return Rejected(f"token id {token} is not in the vocabulary of {size} tokens", param)

    def _check_length(self, length: int, params: SamplingParams, param: str) -> None:
        limit = self._max_model_len
        if length >= limit:
            raise Rejected(
                f"This model's maximum context length is {limit} tokens, and the prompt alone has "
                f"{length}; at least one must be left for the completion.",
                param,
                "context_length_exceeded",
            )
        if params.max_tokens is not None and length + params.max_tokens > limit:
            raise Rejected(
                f"This model's maximum context length is {limit} tokens, but the request asks for "
                f"{length + params.max_tokens} ({length} in the prompt, {params.max_tokens} in the "
                "completion).",
                "max_tokens",
                "context_length_exceeded",
            )
