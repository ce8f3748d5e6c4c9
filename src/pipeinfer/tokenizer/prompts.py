"""Prompts to token ids, and every reason to refuse one.

- PromptEncoder: a text, a chat and given ids end as ids of the model's vocabulary that leave room
  for an answer.
- load_encoder: makes a PromptEncoder from a checkpoint's files and the settings; the stage has one,
  and so has each worker process.
- TokenLengthBound: the least number of tokens that a text can have, by its length: a text that
  cannot fit into the context is refused without being encoded. The bound is certain. For some
  tokenizers there is none: if one drops white space, folds characters or swallows the text around a
  token, a text of any length may fit.

Knows no stage and no channel.
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers

from pipeinfer.checkpoint.config import read_outline
from pipeinfer.checkpoint.pooling import label_ids
from pipeinfer.grammars.bounds import VocabularySetup
from pipeinfer.messages import Submit
from pipeinfer.params import (
    MAX_BAD_IDS,
    MAX_BAD_WORD_IDS,
    ReasoningContext,
    ReasoningState,
    RequestParams,
)
from pipeinfer.settings import ConfigurationError, Settings
from pipeinfer.text import (
    REASONING_PARSERS,
    SPACE,
    ReasoningTags,
    load_tokenizer,
    read_end_ids,
    read_tokenizer_config,
    reasoning_state,
    reasoning_tags,
    template_sources,
    vocabulary_setup,
)
from pipeinfer.tokenizer.chat_templates import ChatTemplates, TemplateFailed, load_templates
from pipeinfer.tokenizer.control_tokens import (
    AmbiguousControlTokens,
    ChatRenderer,
    Component,
    NoEscapeCharacters,
    PlaceholderTokens,
    RenderedPrompt,
    components,
    may_fold_into_special,
    text_weight,
)
from pipeinfer.wire import unpack

TAIL_IDS = 32  # at the end of a prompt, decoded to see with which text the prompt ends
# Ids at the end of a prompt in which tags of several tokens are searched for, since a search in all
# of a long prompt costs too much.
TAG_SEARCH_IDS = 4096
# Context lengths up to which a prompt is encoded if only its length is asked for.
COUNTED_CONTEXTS = 16


class Rejected(ValueError):
    """A prompt that is refused; the text is for the client.

    Attributes:
    - status: of HTTP, 400
    - param: the parameter at fault
    - code: OpenAI's error code, None if there is none
    """

    def __init__(self, message: str, param: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status = 400
        self.param = param
        self.code = code


class TokenizedPrompt(NamedTuple):
    """An encoded prompt.

    Attributes:
    - ids: int32 [n], 0 < n < max_model_len
    - reasoning_state: state in which a chat's prompt leaves the reasoning of the answer
    - reasoning: as for TokenizedRequest
    """

    ids: np.ndarray
    reasoning_state: ReasoningState = "before"
    reasoning: ReasoningContext | None = None


class PromptEncoder:
    """Encodes prompts for one model.

    Attributes:
    - tokenizer: None: only token ids are accepted
    - templates: for chats
    - vocab_size: ids of the model
    - max_model_len: tokens of prompt and output
    - eos_ids: ids that end a request by themselves
    - allow_control_tokens: messages may spell control tokens
    - multithreaded: the process has nothing else to do, so the library may start threads
    - tags: around the reasoning in answers to chats, if a reasoning parser separates it
    - reasoning_budgets: whether engines end reasoning that exceeds a budget
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        templates: ChatTemplates,
        vocab_size: int,
        max_model_len: int,
        eos_ids: tuple[int, ...] = (),
        allow_control_tokens: bool = False,
        multithreaded: bool = False,
        tags: ReasoningTags | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._tags = tags
        # A budget counts reasoning also without a reasoning parser.
        self._budget_tags = tags or _find_tags(tokenizer)
        self.reasoning_budgets = True
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._eos_ids = frozenset(token for token in eos_ids if 0 <= token < vocab_size)
        self._multithreaded = multithreaded
        # The bad words that were encoded last, and their ids.
        self._last_bad_words: tuple[tuple[str, ...], tuple[tuple[int, ...], ...]] = ((), ())
        self._length_bound = None if tokenizer is None else token_length_bound(tokenizer)
        self._placeholders = None if tokenizer is None else PlaceholderTokens(tokenizer)
        texts = () if tokenizer is None or allow_control_tokens else special_texts(tokenizer)
        always = (
            tokenizer is not None and not allow_control_tokens and may_fold_into_special(tokenizer)
        )
        self._renderer = ChatRenderer(texts, templates, always)

    def weigh(self, submit: Submit) -> int:
        """About how many bytes `encode` has to render and to encode; token ids weigh nothing.

        Raises Rejected for all reasons that need no encoding of the prompt.
        """
        self._check_params(submit.params)
        if submit.chat is not None:
            try:
                return self._renderer.weigh(submit.chat, submit.template_arguments)
            except TemplateFailed as error:
                raise Rejected(str(error), error.param) from None
        if submit.text is None:
            return 0
        self._check_text_length(submit.text, submit, "prompt")
        return text_weight(submit.text)

    def encode(self, submit: Submit) -> np.ndarray:
        """The ids of `prompt`."""
        return self.prompt(submit).ids

    def prompt(self, submit: Submit) -> TokenizedPrompt:
        """Encodes the prompt of `submit`. Raises Rejected."""
        param, state = "prompt" if submit.chat is None else "messages", None
        self._check_params(submit.params)
        if submit.chat is not None:
            ids, state = self._encode_chat(submit)
        elif submit.text is not None:
            self._check_text_length(submit.text, submit, param)
            ids = self._tokenize(submit.text, submit.add_special_tokens, param)
        elif submit.prompt_ids is not None:
            ids = unpack(submit.prompt_ids)
        else:
            raise Rejected("the request has no prompt", param)
        if not len(ids):
            if submit.only_encode and submit.chat is None:
                return TokenizedPrompt(ids)  # an empty text has 0 tokens
            raise Rejected("the prompt is empty", param)
        self._check_vocabulary(ids, param)
        truncated = self._truncate(ids, submit.params)
        if len(truncated) < len(ids) and submit.params.truncation_side == "right":
            state = None  # the end of the rendered prompt is cut off
        if not _counts_only(submit):
            self._check_length(len(truncated), submit.params, param)
        return self._with_reasoning(submit, truncated, state)

    def _with_reasoning(
        self, submit: Submit, ids: np.ndarray, state: ReasoningState | None
    ) -> TokenizedPrompt:
        """Adds the reasoning state to the prompt `ids`. `state`: in which a chat's template leaves
        the reasoning; None: to be found from the ids."""
        params, chat, tags = submit.params, submit.chat is not None, self._tags
        spec, budget = params.structured_outputs, params.thinking_token_budget is not None
        if budget:
            tags = self._budget_tags
        if spec is not None and spec.after and (tags is None or spec.after != tags.closing):
            # The client names the text behind which its grammar begins.
            closed = self._decode(ids[-TAIL_IDS:]).rstrip(SPACE).endswith(spec.after)
            reasoning = ReasoningContext("", spec.after, "over" if closed else "open")
            return TokenizedPrompt(ids, state or "before", reasoning)
        if tags is None or not (chat or budget or spec is not None):
            return TokenizedPrompt(ids)
        if state is None:
            state = self._reasoning_state(ids, tags)
        waits = budget or spec is not None
        if spec is not None and not chat and not spec.after:
            # A completion's grammar is about all of its text, unless the prompt begins reasoning.
            at_end = self._decode(ids[-TAIL_IDS:]).rstrip(SPACE).endswith(tags.opening)
            waits = state == "open" and (budget or at_end)
        return TokenizedPrompt(ids, state, ReasoningContext(*tags.pair, state) if waits else None)

    def _reasoning_state(self, ids: np.ndarray, tags: ReasoningTags) -> ReasoningState:
        """The state in which a prompt that no template made leaves the reasoning."""
        assert self._tokenizer is not None
        opening, closing = map(self._tokenizer.token_to_id, tags.pair)
        if opening is None or closing is None:
            return reasoning_state(self._decode(ids[-TAG_SEARCH_IDS:]), tags)
        tags_at = np.flatnonzero((ids == opening) | (ids == closing))
        return (
            reasoning_state(self._decode(ids[tags_at[-1] :][:TAIL_IDS]), tags)
            if len(tags_at)
            else "before"
        )

    def _decode(self, ids: np.ndarray) -> str:
        """The text of `ids`, with special tokens."""
        if self._tokenizer is None:
            return ""
        return self._tokenizer.decode(ids.tolist(), skip_special_tokens=False)

    def bad_word_ids(self, params: RequestParams) -> tuple[tuple[int, ...], ...]:
        """The bad words as ids, each as at the beginning of a text and as behind a space. Ids that
        end with those of another word are left out: their last token is suppressed by the other.

        Raises Rejected.
        """
        if self._last_bad_words[0] != params.bad_words:
            self._last_bad_words = params.bad_words, self._encode_bad_words(params.bad_words)
        return self._last_bad_words[1]

    def _encode_bad_words(self, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        spelled: dict[tuple[int, ...], None] = {}
        for word in words:
            bare = word.lstrip()
            for text in (bare, f" {bare}"):
                spelled[tuple(self._tokenize(text, False, "bad_words").tolist())] = None
        spelled.pop((), None)
        ids = [s for s in spelled if not any(s[at:] in spelled for at in range(1, len(s)))]
        longest = max(map(len, ids), default=0)
        if longest > MAX_BAD_WORD_IDS:
            raise Rejected(
                f"at most {MAX_BAD_WORD_IDS} tokens a bad word, not {longest}", "bad_words"
            )
        total = sum(map(len, ids))
        if total > MAX_BAD_IDS:
            message = f"bad_words must have at most {MAX_BAD_IDS} tokens in all, not {total}"
            raise Rejected(message, "bad_words")
        return tuple(ids)

    def text(self, ids: np.ndarray, skip_special_tokens: bool) -> str:
        """The text of `ids`; empty if there is no tokenizer."""
        if self._tokenizer is None:
            return ""
        return self._tokenizer.decode(ids.tolist(), skip_special_tokens=skip_special_tokens)

    def token_strs(self, ids: np.ndarray) -> tuple[str, ...]:
        """`ids` as the vocabulary writes them; empty texts for padding of the vocabulary, and if
        there is no tokenizer."""
        if self._tokenizer is None:
            return ("",) * len(ids)
        return tuple(self._tokenizer.id_to_token(token) or "" for token in ids.tolist())

    # ------------------------------------------------------------------------------------- encoding

    def _encode_chat(self, submit: Submit) -> tuple[np.ndarray, ReasoningState | None]:
        """The ids of a chat, and the state of reasoning at their end; None if it is not known."""
        assert submit.chat is not None
        tags, state = self._tags or self._budget_tags, None
        try:
            rendered = self._renderer.render(submit.chat, submit.template_arguments)
            if tags is not None:
                text = rendered.text
                state = self._renderer.reasoning_state(
                    submit.chat, submit.template_arguments, text, tags
                )
            self._check_text_length(rendered.text, submit, "messages")
            if rendered.escaped is None or self._placeholders is None:
                # The template has written the special tokens already.
                return self._tokenize(rendered.text, False, "messages"), state
            return self._encode_with_placeholders(rendered, self._placeholders), state
        except TemplateFailed as error:
            raise Rejected(str(error), error.param) from None
        except (NoEscapeCharacters, AmbiguousControlTokens) as error:
            raise Rejected(str(error), "messages") from None

    def _encode_with_placeholders(
        self, rendered: RenderedPrompt, placeholders: PlaceholderTokens
    ) -> np.ndarray:
        """With the template's control tokens as tokens and the client's as text."""
        assert rendered.escaped is not None
        text, first = placeholders.insert_placeholders(rendered.escaped.text)
        if rendered.escaped.escapes is not None:
            text = rendered.escaped.escapes.unescape(text)
        return placeholders.encode(text, first, self._multithreaded)

    def _tokenize(self, text: str, add_special_tokens: bool, param: str) -> np.ndarray:
        if self._tokenizer is None:
            raise Rejected(
                "the model has no tokenizer.json, so it takes prompts as token ids only", param
            )
        try:
            if self._multithreaded:  # several times as fast, and lets other threads run
                (encoding,) = self._tokenizer.encode_batch_fast(
                    [text], add_special_tokens=add_special_tokens
                )
            else:
                encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except Exception as error:  # the library raises bare Exception
            raise Rejected(f"the text cannot be tokenized: {error}", param) from None
        return np.asarray(encoding.ids, dtype="<i4")

    def _truncate(self, ids: np.ndarray, params: RequestParams) -> np.ndarray:
        """`ids`, cut to truncate_prompt_tokens."""
        max_tokens = params.truncate_prompt_tokens
        if not max_tokens:
            return ids
        if max_tokens < 0:
            max_tokens = self._max_model_len - (params.max_tokens or 1)
        max_tokens = max(max_tokens, 1)
        return ids[:max_tokens] if params.truncation_side == "right" else ids[-max_tokens:]

    # ------------------------------------------------------------------------------------- refusing

    def _check_text_length(self, text: str, submit: Submit, param: str) -> None:
        """Refuses a text that has too many tokens however it is encoded, unless it is truncated."""
        if submit.params.truncate_prompt_tokens:
            return
        min_tokens = 0 if self._length_bound is None else self._length_bound.min_token_count(text)
        if min_tokens >= self._max_model_len * (COUNTED_CONTEXTS if _counts_only(submit) else 1):
            raise self._too_long(f"at least {min_tokens}", param)

    def _check_vocabulary(self, ids: np.ndarray, param: str) -> None:
        if int(ids.view(np.uint32).max()) >= self._vocab_size:  # as uint32, negative ids are large
            wrong = ids[(ids < 0) | (ids >= self._vocab_size)]
            raise self._unknown_token(int(wrong[0]), param)

    def _check_params(self, params: RequestParams) -> None:
        if params.thinking_token_budget is not None and not (
            self.reasoning_budgets and self._budget_tags
        ):
            message = "this model, or this server, has no <think> and </think> to count between"
            raise Rejected(message, "thinking_token_budget")
        for param in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
            for token in getattr(params, param) or ():
                if not 0 <= token < self._vocab_size:
                    raise self._unknown_token(token, param)
        banned = frozenset(ids[0] for ids in self.bad_word_ids(params) if len(ids) == 1)
        if params.allowed_token_ids is None:
            allowed, all_there_are = None, f"all {self._vocab_size} tokens of the vocabulary"
        else:
            allowed, all_there_are = frozenset(params.allowed_token_ids), "all allowed_token_ids"
        num_allowed = self._vocab_size - len(banned) if allowed is None else len(allowed - banned)
        if not num_allowed:
            raise Rejected(f"{all_there_are} are bad_words, so that none is left", "bad_words")
        if params.min_tokens > 0:
            end_ids = frozenset(params.stop_token_ids)
            if not params.ignore_eos:
                end_ids |= self._eos_ids
            end_ids -= banned
            if len(end_ids if allowed is None else end_ids & allowed) >= num_allowed:
                raise Rejected(
                    f"min_tokens is {params.min_tokens}, but {all_there_are} end the answer, so "
                    "that none is left to begin it with",
                    "min_tokens",
                )

    def _unknown_token(self, token: int, param: str) -> Rejected:
        size = self._vocab_size
        return Rejected(f"token id {token} is not in the vocabulary of {size} tokens", param)

    def _too_long(self, tokens: str, param: str) -> Rejected:
        return Rejected(
            f"This model's maximum context length is {self._max_model_len} tokens, and the prompt "
            f"alone has {tokens}; at least one must be left for the completion.",
            param,
            "context_length_exceeded",
        )

    def _check_length(self, length: int, params: RequestParams, param: str) -> None:
        limit = self._max_model_len
        if length >= limit:
            raise self._too_long(str(length), param)
        if params.max_tokens is not None and length + params.max_tokens > limit:
            raise Rejected(
                f"This model's maximum context length is {limit} tokens, but the request asks for "
                f"{length + params.max_tokens} ({length} in the prompt, {params.max_tokens} in the "
                "completion).",
                "max_tokens",
                "context_length_exceeded",
            )


def _counts_only(submit: Submit) -> bool:
    """Whether only the prompt's tokens are counted."""
    return submit.only_encode and submit.params.max_tokens == 0


def _find_tags(tokenizer: Tokenizer | None) -> ReasoningTags | None:
    """The reasoning tags that are tokens of `tokenizer`; None if there are none."""
    for tags in REASONING_PARSERS.values():
        if tokenizer is not None and None not in map(tokenizer.token_to_id, tags.pair):
            return tags
    return None


def special_texts(tokenizer: Tokenizer) -> tuple[str, ...]:
    """The texts of the tokenizer's special tokens, which control the model."""
    added = tokenizer.get_added_tokens_decoder().values()
    return tuple(token.content for token in added if token.special)


class EncoderParts(NamedTuple):
    """The parts that `load_encoder` makes of a checkpoint.

    Attributes:
    - encoder: for its prompts
    - eos_ids: ids that end a request by themselves
    - grammar_setup: the vocabulary for grammars; None: no grammars are served
    - no_grammars_because: the refusal of requests with grammars then
    """

    encoder: PromptEncoder
    eos_ids: tuple[int, ...]
    grammar_setup: VocabularySetup | None
    no_grammars_because: str


def load_encoder(folder: Path, settings: Settings, multithreaded: bool = False) -> EncoderParts:
    """The encoder of the checkpoint in `folder`; `multithreaded` as for PromptEncoder. Raises
    ConfigurationError."""
    model = read_outline(folder, settings.model_impl)
    config = read_tokenizer_config(folder)
    tokenizer = load_tokenizer(folder, config)
    if settings.task == "score":
        label_ids(tokenizer)
    eos_ids = read_end_ids(folder, tokenizer, config)
    shown = "\n".join(template_sources(folder, config, settings.chat_template).values())
    encoder = PromptEncoder(
        tokenizer,
        load_templates(
            folder,
            config,
            settings.chat_template,
            _strftime_now,
            settings.trust_request_chat_template,
        ),
        model.vocab_size,
        settings.max_model_len or model.context_length,
        eos_ids,
        settings.control_tokens_in_messages,
        multithreaded,
        reasoning_tags(settings.reasoning_parser, shown),
    )
    if multithreaded:  # a worker process, which only encodes
        return EncoderParts(encoder, eos_ids, None, "")
    if settings.grammar_backend == "none":
        encoder.reasoning_budgets = False  # engines count reasoning by their masks
        return EncoderParts(encoder, eos_ids, None, "this server was started without grammars")
    try:
        vocabulary = vocabulary_setup(tokenizer, model.vocab_size, eos_ids)
    except ConfigurationError as error:
        return EncoderParts(encoder, eos_ids, None, f"this model serves no grammars: {error}")
    return EncoderParts(encoder, eos_ids, vocabulary, "")


def _strftime_now(template: str) -> str:
    # Only templates that print today's date ask, so only their prompts depend on the day.
    return datetime.now().strftime(template)


# NFC composes: the longest spelling of a character has 3.5 times the bytes of its composed form
# (U+1FBE U+0308 U+0301, 7 bytes, become U+0390, 2 bytes). The library's table of Unicode may be
# newer than Python's, in which that was counted.
NFC_SHRINK = 4
KEEPING_BEHAVIORS = frozenset(("Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous"))
BYTE_TOKENS = frozenset(f"<0x{byte:02X}>" for byte in range(256))


class TokenLengthBound(NamedTuple):
    """A bound for one tokenizer.

    max_token_bytes: bytes of normalized text that one token covers at most.
    normalized_shrink: so many bytes of a text become at least one byte of normalized text. ASCII
      never shrinks.
    """

    max_token_bytes: int
    normalized_shrink: int

    def min_token_count(self, text: str) -> int:
        """Every encoding of `text` has at least so many tokens."""
        if text.isascii():
            return -(-len(text) // self.max_token_bytes)
        size = len(text.encode("utf-8", "surrogatepass"))
        return -(-size // (self.max_token_bytes * self.normalized_shrink))


def token_length_bound(tokenizer: Tokenizer) -> TokenLengthBound | None:
    """None if a component of the tokenizer is not known to keep every byte of a text."""
    added = tokenizer.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip for token in added):
        return None  # it takes all white space around it, however much there is
    shrinks = 1
    for one in components(tokenizer.normalizer):
        shrinks *= _shrink_of(one)
    splitters = components(tokenizer.pre_tokenizer)
    if not shrinks or not all(_preserves_text(one) for one in splitters):
        return None
    spelled = any(one.type == "ByteLevel" for one in splitters)
    longest = _max_token_bytes(tokenizer, spelled)
    if not longest:
        return None
    for token in added:
        texts = [token.content]
        if tokenizer.normalizer is not None:
            texts.append(tokenizer.normalizer.normalize_str(token.content))
        longest = max(longest, *(len(text.encode()) for text in texts))
    return TokenLengthBound(longest, shrinks)


def _shrink_of(one: Component) -> int:
    """So many bytes become at least one; 0: any number may vanish."""
    kind = one.type
    if kind == "NFC":
        return NFC_SHRINK
    if kind == "Prepend":
        return 1
    if kind == "Replace":
        old, new = one.pattern.get("String", ""), one.content
        return int(bool(old) and len(new.encode()) >= len(old.encode()))
    return 0


def _preserves_text(one: Component) -> bool:
    """Whether a pre-tokenizer passes on every character."""
    if one.type in ("Split", "Punctuation"):
        return one.behavior in KEEPING_BEHAVIORS
    return one.type in ("ByteLevel", "Metaspace", "Digits")


def _max_token_bytes(tokenizer: Tokenizer, spelled: bool) -> int:
    """Bytes of the longest token of a vocabulary that has every byte; 0 if it has not.

    `spelled`: a character of a token stands for one byte.
    """
    model = tokenizer.model
    if not isinstance(model, models.BPE):
        return 0  # others make one token of any run of unknown characters
    if model.continuing_subword_prefix or model.end_of_word_suffix:
        return 0
    tokens = tokenizer.get_vocab(with_added_tokens=False)
    if spelled:
        complete = all(character in tokens for character in pre_tokenizers.ByteLevel.alphabet())
        return max(map(len, tokens)) if complete else 0
    if not model.byte_fallback or any(token not in tokens for token in BYTE_TOKENS):
        return 0
    return max(len(token.encode()) for token in tokens)
