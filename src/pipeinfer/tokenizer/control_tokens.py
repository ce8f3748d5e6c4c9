"""Chats to prompts in which control tokens come from the template alone, never from a client.

A message may spell a control token (`<|im_end|>`), or a part of one that the template completes.
- ChatRenderer: chats to texts, by the checkpoint's template or by the request's own.
- ControlTokenEscaping: puts escape characters, which occur nowhere in the chat, into spelled
  control tokens before the template runs. They are taken out afterwards.
- PlaceholderTokens: encodes such a text. A tokenizer beside the checkpoint's own, with the same
  vocabulary, has a private-use character in place of each special token: the template's control
  tokens are written so, and `<|im_end|>` is a text like any other.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from typing import Literal, NamedTuple, TypeVar

import msgspec
import numpy as np
from tokenizers import AddedToken, Tokenizer
from tokenizers.normalizers import Normalizer
from tokenizers.pre_tokenizers import PreTokenizer

from pipeinfer.params import JsonObject, JsonValue, ReasoningState
from pipeinfer.text import SPACE, ReasoningTags, content_text, reasoning_state
from pipeinfer.tokenizer.chat_templates import ChatTemplates, TemplateFailed, argument_forms

MAX_TEMPLATE_CHARS = 65_536  # of a request's template: several times the longest one known
COMPILE_WEIGHT = 64 * 1024  # bytes of text that take as long to encode as a template to compile
MAX_REQUEST_TEMPLATES = 4  # compiled templates of requests that are kept
# Marks the end of a message that the model continues, so that the end is found in the rendered
# text: a character of the last private plane that is not in the chat.
CONTINUATION_MARKERS = range(0x10FFFD, 0x10FF00, -1)
ESCAPE_CHARACTERS = range(0xE000, 0xF900)  # private use: unknown to templates, no white space
# Placeholders are at the ends of the private-use planes, which icon fonts do not use. The second
# plane is for texts that use the first.
PLACEHOLDER_PLANES = (0xFFFFE, 0x10FFFE)
# Roles that a template knows by name, of which it may build a control token: '<|' + role + '|>'.
ROLES = frozenset(("system", "developer", "user", "assistant", "tool", "function"))
NODE_WEIGHT = 8  # bytes of text that take as long to encode as one more value takes to render
MAX_VALUES_WEIGHED = 10_000  # counting more takes longer than short requests may wait
UNKNOWN_WEIGHT = 1 << 40  # of a chat with more values

# free: the whole text of a message's field, or of a part of its content. part: a string somewhere
# inside, which a template may look up or compare ("type": "function"). key: the name of a value.
StringKind = Literal["free", "part", "key"]
MapString = Callable[[str, StringKind], str]
T = TypeVar("T")


class ChatRenderer:
    """Renders chats so that control tokens come from a template alone.

    Arguments:
    - texts: the control tokens of the tokenizer
    - templates: the checkpoint's
    - always_escaped: see ControlTokenEscaping
    """

    def __init__(
        self, texts: Iterable[str], templates: ChatTemplates, always_escaped: bool = False
    ) -> None:
        self._texts = tuple(texts)
        self._templates = templates
        self._always_escaped = always_escaped
        self._checkpoint_escaping = ControlTokenEscaping(self._texts, templates, always_escaped)
        self._request_escapings: dict[str, ControlTokenEscaping] = {}

    def weigh(self, chat: list[JsonObject], arguments: JsonObject) -> int:
        """About how many bytes there are to render and to encode. Raises TemplateFailed for a
        template that is refused."""
        brought = self._request_template(arguments) is not None
        return text_weight(chat, arguments) + COMPILE_WEIGHT * brought

    def render(self, chat: list[JsonObject], arguments: JsonObject) -> RenderedPrompt:
        """Renders the chat into a prompt. `chat_template` and `continue_final_message` among the
        arguments are not for the template. Raises TemplateFailed and NoEscapeCharacters."""
        source, arguments = self._request_template(arguments), arguments.copy()
        arguments.pop("chat_template", None)
        continues = arguments.pop("continue_final_message", None)
        chosen = self._checkpoint_escaping if source is None else self._request_escaping(source)
        if continues and arguments.get("add_generation_prompt", True) is not False:
            message = "continue_final_message is only allowed with add_generation_prompt: false"
            raise TemplateFailed(message, "continue_final_message")
        return _with_argument_forms(
            partial(_render_continuation, chosen) if continues else chosen.render, chat, arguments
        )

    def reasoning_state(
        self, chat: list[JsonObject], arguments: JsonObject, prompt: str, tags: ReasoningTags
    ) -> ReasoningState:
        """The state in which `prompt`, which `render` made of this chat, leaves the reasoning of
        its answer. Tags that a client spells do not count, except in a message that the model
        continues. Raises TemplateFailed."""
        if arguments.get("continue_final_message"):
            answer = content_text(chat[-1].get("content"))
            return (
                "open" if reasoning_state(answer, tags) == "open" else "over"
            )  # the answer has begun
        state = reasoning_state(prompt, tags)
        if state == "before":
            return state
        source, arguments = self._request_template(arguments), arguments.copy()
        arguments.pop("chat_template", None)
        templates = self._templates if source is None else self._templates.with_template(source)
        if any(tag in text for text, _ in client_strings(chat, arguments) for tag in tags.pair):
            chat, arguments = map_client_strings(chat, arguments, partial(_without_tags, tags=tags))
            prompt = _with_argument_forms(templates.render, chat, arguments)
            state = reasoning_state(prompt, tags)
        if state == "open" and prompt.rpartition(tags.opening)[2].strip(SPACE):
            # The tag may belong to the template's instructions about the form of answers.
            without_prompt = _with_argument_forms(
                templates.render, chat, {**arguments, "add_generation_prompt": False}
            )
            if without_prompt != prompt and prompt.startswith(without_prompt):
                state = reasoning_state(prompt[len(without_prompt) :], tags)
        return state

    def _request_template(self, arguments: JsonObject) -> str | None:
        """The request's own template, None if it has none. Raises TemplateFailed."""
        source = arguments.get("chat_template")
        if source is None:
            return None
        if not self._templates.allow_request_templates:
            message = (
                "chat_template is taken only by a server with --trust-request-chat-template: a "
                "template is a program"
            )
            raise TemplateFailed(message, "chat_template")
        if not isinstance(source, str) or len(source) > MAX_TEMPLATE_CHARS:
            message = f"chat_template must be a text of at most {MAX_TEMPLATE_CHARS} characters"
            raise TemplateFailed(message, "chat_template")
        return source

    def _request_escaping(self, source: str) -> ControlTokenEscaping:
        found = self._request_escapings.pop(source, None)
        if found is None:
            found = ControlTokenEscaping(
                self._texts, self._templates.with_template(source), self._always_escaped
            )
        while len(self._request_escapings) >= MAX_REQUEST_TEMPLATES:
            del self._request_escapings[next(iter(self._request_escapings))]
        self._request_escapings[source] = found
        return found


def _with_argument_forms(
    render: Callable[[list[JsonObject], JsonObject], T],
    chat: list[JsonObject],
    arguments: JsonObject,
) -> T:
    """`render` with the arguments of tool calls in the form that the template takes. Raises
    TemplateFailed, and what else `render` raises."""
    form, *other_forms = argument_forms(chat)
    try:
        return render(form, arguments)
    except TemplateFailed:
        for other in other_forms:
            with suppress(TemplateFailed):  # the error about the usual form is more telling
                return render(other, arguments)
        raise


def _without_tags(text: str, _kind: StringKind, tags: ReasoningTags) -> str:
    """`text` with the tags broken, so that the template sees a text of the same kind."""
    for tag in tags.pair:
        text = text.replace(tag, f"{tag[:1]}\ue000{tag[1:]}")
    return text


def _render_continuation(
    chosen: ControlTokenEscaping, chat: list[JsonObject], arguments: JsonObject
) -> RenderedPrompt:
    """The prompt up to the end of the last message's content, which the model continues. White
    space at the end is left out if the template trims contents."""
    last: JsonObject = chat[-1] if chat else {}
    used_characters = {
        character for text, _ in client_strings(chat, arguments) for character in text
    }
    marker = next(chr(code) for code in CONTINUATION_MARKERS if chr(code) not in used_characters)
    content = _append_to_content(last.get("content"), marker + " ")
    if last.get("role") != "assistant" or content is None:
        message = "continue_final_message needs a last message of the assistant, with content"
        raise TemplateFailed(message, "continue_final_message")
    rendered = chosen.render([*chat[:-1], {**last, "content": content}], arguments)
    text, _, after = rendered.text.partition(marker)
    if rendered.text.count(marker) != 1:
        message = "the chat template does not show the last message's content once, as it is"
        raise TemplateFailed(message, "continue_final_message")
    trims = not after.startswith(" ")
    escaped = rendered.escaped
    if escaped is not None:
        before = escaped.text.partition(marker)[0]
        if trims:
            before = _trim_end(before, "" if escaped.escapes is None else escaped.escapes.separator)
        escaped = EscapedPrompt(before, escaped.escapes)
    return RenderedPrompt(text.rstrip() if trims else text, escaped)


def _append_to_content(content: JsonValue, marker: str) -> JsonValue:
    """`content` with `marker` behind its last text; None if there is no text to continue."""
    if isinstance(content, str):
        return content + marker if content else None
    parts = content if isinstance(content, list) else []
    for at in reversed(range(len(parts))):
        part = parts[at]
        if isinstance(part, dict) and isinstance(text := part.get("text"), str) and text:
            return [*parts[:at], {**part, "text": text + marker}, *parts[at + 1 :]]
    return None


def _trim_end(text: str, separator: str) -> str:
    """`text` without white space at its end, and without the escape characters in it."""
    while (shorter := text.rstrip().rstrip(separator or None)) != text:
        text = shorter
    return text


_NAME = re.compile(r"\w+")
# Private-use characters as themselves, and as JSON and Python write them in ASCII.
_PRIVATE = re.compile("[\ue000-\uf8ff]|\\\\u[ef][0-9a-f]{3}", re.IGNORECASE)


class NoEscapeCharacters(ValueError):
    """The chat holds all characters that could escape; the text is for the client."""


class RenderedPrompt(NamedTuple):
    """A chat as text.

    text: the prompt.
    escaped: the prompt with escape characters, if a client's text in it spells a control token.
    """

    text: str
    escaped: EscapedPrompt | None = None


class EscapedPrompt(NamedTuple):
    """A prompt in which all control tokens are the template's.

    text: with escape characters.
    escapes: the characters; None if there are none in the text.
    """

    text: str
    escapes: EscapeCharacters | None


class EscapeCharacters:
    """Characters that a chat does not hold.

    Attributes:
    - single: control tokens of one character, each of which is replaced by an escape character
    - used: characters that cannot be escapes
    - separator: put between the characters of longer control tokens
    """

    def __init__(self, single: Iterable[str], used: set[str]) -> None:
        free = (chr(code) for code in ESCAPE_CHARACTERS if chr(code) not in used)
        self.separator = _next_escape(free)
        self._singles = {ord(token): _next_escape(free) for token in single}
        self._originals: dict[int, str | None] = {ord(self.separator): None}
        self._originals |= {ord(escape): chr(code) for code, escape in self._singles.items()}

    def replace_single(self, text: str) -> str:
        """`text` with escape characters in place of control tokens of one character."""
        return text.translate(self._singles) if self._singles else text

    def unescape(self, text: str) -> str:
        """The text without escape characters."""
        for code, old in self._originals.items():
            text = re.sub(f"\\\\u{code:04x}", _constant(old or ""), text, flags=re.IGNORECASE)
        return text.translate(self._originals)


class ControlTokenEscaping:
    """Renders chats with escape characters in what clients wrote.

    texts: the control tokens of one tokenizer.
    always_escaped: other texts, too, may become control tokens, so every prompt has `escaped`.
    """

    def __init__(
        self, texts: Iterable[str], templates: ChatTemplates, always_escaped: bool = False
    ) -> None:
        self._templates = templates
        self._always_escaped = always_escaped
        tokens = sorted({text for text in texts if text}, key=len, reverse=True)
        self._single = [token for token in tokens if len(token) == 1]
        longer = [token for token in tokens if len(token) > 1]
        self._has_control_tokens = bool(tokens)
        self._token_pattern = _any_of(tokens)
        self._long_token_pattern = _any_of(longer)
        self._inner_texts = "\0".join(token[1:-1] for token in longer)
        self._first_letters = {token[0] for token in tokens}
        self._last_letters = {token[-1] for token in tokens}
        # Two characters at either end: what is longer has them, and what is shorter is a text's
        # first or last character.
        edges = {*self._single, *(token[:2] for token in longer), *(token[-2:] for token in longer)}
        self._edge_pattern = _any_of(sorted(edges))
        self._has_spaces = any(map(str.isspace, "".join(tokens)))

    def render(self, chat: list[JsonObject], arguments: JsonObject) -> RenderedPrompt:
        """Renders the chat into a prompt. Raises TemplateFailed and NoEscapeCharacters.

        A chat in which nothing looks like a part of a control token is rendered once, as it is.
        Another one is rendered with spelled control tokens escaped, and once more with each of the
        client's characters by itself. If the second rendering has other control tokens, the
        template joined some from parts, and the second rendering is used.
        """
        strings = list(client_strings(chat, arguments)) if self._has_control_tokens else []
        if not any(self._may_spell(text, kind) for text, kind in strings):
            text = self._templates.render(chat, arguments)
            return RenderedPrompt(text, EscapedPrompt(text, None) if self._always_escaped else None)
        escapes = EscapeCharacters(self._single, self._used_characters(text for text, _ in strings))
        spelled = any(self._token_pattern.search(text) for text, _ in strings)
        text = self._templates.render(
            *map_client_strings(chat, arguments, lambda text, _: self._escape_tokens(text, escapes))
        )
        strict = self._templates.render(
            *map_client_strings(
                chat, arguments, lambda text, kind: self._escape_all(text, kind, escapes)
            )
        )
        if self._token_pattern.findall(text) != self._token_pattern.findall(strict):
            text, spelled = strict, True
        escaped = EscapedPrompt(text, escapes) if spelled or self._always_escaped else None
        return RenderedPrompt(escapes.unescape(text), escaped)

    def _may_spell(self, text: str, kind: StringKind) -> bool:
        if self._edge_pattern.search(text) is not None:
            return True
        bare = text.strip()
        if not bare or kind == "key":
            return False
        if bare[-1] in self._first_letters or bare[0] in self._last_letters:
            return True
        return kind == "free" and bare in self._inner_texts

    def _used_characters(self, texts: Iterable[str]) -> set[str]:
        used: set[str] = set()
        for text in (*texts, self._templates.source):
            for found in _PRIVATE.findall(text):
                used.add(chr(int(found[2:], 16)) if len(found) > 1 else found)
        return used

    def _escape_tokens(self, text: str, escapes: EscapeCharacters) -> str:
        """`text` without any spelled control token."""
        text, before = escapes.replace_single(text), None
        while text != before:
            before = text
            text = self._long_token_pattern.sub(
                lambda m: m[0][0] + escapes.separator + m[0][1:], text
            )
        return text

    def _escape_all(self, text: str, kind: StringKind, escapes: EscapeCharacters) -> str:
        """`text` with a separator between any two characters and at both ends, so that none is a
        part of a control token. Names and ids, which a template may look up, stay whole."""
        if kind != "free" and _NAME.fullmatch(text):
            return self._escape_tokens(text, escapes)
        text, escape = escapes.replace_single(text), escapes.separator
        bare = text if self._has_spaces else text.strip()  # so that a template can still trim it
        before, _, after = text.partition(bare) if bare else ("", "", text)
        return f"{before}{escape}{escape.join(bare)}{escape}{after}" if bare else text


def _any_of(texts: list[str]) -> re.Pattern[str]:
    """Matches any of `texts`, the first ones first; nothing if there are none."""
    return re.compile("|".join(map(re.escape, texts)) or r"(?!)")


def _next_escape(free: Iterator[str]) -> str:
    for escape in free:
        return escape
    raise NoEscapeCharacters(
        "the messages hold control tokens' texts and all private-use characters"
    )


def _constant(text: str) -> Callable[[re.Match[str]], str]:
    return lambda _: text


def text_weight(*values: JsonValue | list[JsonObject]) -> int:
    """About how many bytes of text there are, in at most a millisecond; UNKNOWN_WEIGHT for more
    than MAX_VALUES_WEIGHED values."""
    waiting: list[JsonValue | list[JsonObject]] = list(values)
    total = seen = 0
    while waiting:
        value = waiting.pop()
        seen += 1
        if isinstance(value, str):
            total += _size(value)
        elif isinstance(value, dict | list):
            if seen + len(waiting) + 2 * len(value) > MAX_VALUES_WEIGHED:
                return UNKNOWN_WEIGHT
            waiting += value
            waiting += value.values() if isinstance(value, dict) else ()
    return total + NODE_WEIGHT * seen


def _size(text: str) -> int:
    """Bytes; of a very long text its characters, so that it need not be copied."""
    short = not text.isascii() and len(text) <= MAX_VALUES_WEIGHED
    return len(text.encode("utf-8", "surrogatepass")) if short else len(text)


def client_strings(
    chat: list[JsonObject], arguments: JsonObject
) -> Iterator[tuple[str, StringKind]]:
    """The strings that a client wrote: messages and template arguments, without known roles."""
    found: list[tuple[str, StringKind]] = []

    def note(text: str, kind: StringKind) -> str:
        found.append((text, kind))
        return text

    map_client_strings(chat, arguments, note)
    return iter(found)


def map_client_strings(
    chat: list[JsonObject], arguments: JsonObject, write: MapString
) -> tuple[list[JsonObject], JsonObject]:
    """(messages, arguments) with `write(text, kind)` in place of each string."""
    messages = [_message(message, write) for message in chat]
    return messages, _object(arguments, write)


def _message(message: JsonObject, write: MapString) -> JsonObject:
    copy: JsonObject = {}
    for key, value in message.items():
        if key == "role" and isinstance(value, str) and value in ROLES:
            copy[key] = value
        elif isinstance(value, str):
            kind = "part" if key == "tool_call_id" else "free"  # as the id that it refers to
            copy[write(key, "key")] = write(value, kind)
        elif key == "content" and isinstance(value, list):
            copy[key] = [_part(part, write) for part in value]
        else:
            copy[write(key, "key")] = _nested(value, write)
    return copy


def _part(part: JsonValue, write: MapString) -> JsonValue:
    """A part of a content, whose text a template shows as it shows a whole content."""
    if not isinstance(part, dict) or not isinstance(part.get("text"), str):
        return _nested(part, write)
    return {
        write(key, "key"): write(value, "free")
        if key == "text" and isinstance(value, str)
        else _nested(value, write)
        for key, value in part.items()
    }


def _nested(value: JsonValue, write: MapString) -> JsonValue:
    if isinstance(value, str):
        return write(value, "part")
    if isinstance(value, list):
        return [_nested(one, write) for one in value]
    if isinstance(value, dict):
        return _object(value, write)
    return value


def _object(value: JsonObject, write: MapString) -> JsonObject:
    return {write(key, "key"): _nested(one, write) for key, one in value.items()}


class AmbiguousControlTokens(ValueError):
    """Control tokens cannot be distinguished from texts that spell them; the text is for the
    client."""


class _PlaneTokenizer(NamedTuple):
    """A tokenizer with placeholders from one private-use plane.

    checkpoint_ids: int32 [n], the checkpoint's id of each id of `tokenizer`.
    is_placeholder: bool [n].
    """

    tokenizer: Tokenizer
    checkpoint_ids: np.ndarray
    is_placeholder: np.ndarray


class PlaceholderTokens:
    """Encodes texts in which only placeholders are special tokens.

    Attributes:
    - _special, _non_special: added tokens of the checkpoint, by id
    - _by_plane: tokenizers by the first placeholder of their plane, made when needed
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._special = [(i, token) for i, token in sorted(added.items()) if token.special]
        self._non_special = [(i, token) for i, token in sorted(added.items()) if not token.special]
        contents = sorted((token.content for token in added.values()), key=len, reverse=True)
        self._added_pattern = re.compile("|".join(map(re.escape, contents)))
        self._by_plane: dict[int, _PlaneTokenizer] = {}

    def insert_placeholders(self, text: str) -> tuple[str, int]:
        """(`text` with placeholders for the special tokens in it, the first placeholder of their
        plane). Raises AmbiguousControlTokens."""
        for end in PLACEHOLDER_PLANES:
            first = end - len(self._special)
            if self._placeholder_pattern(first).search(text) is None:
                names = enumerate(token.content for _, token in self._special)
                table = {content: chr(first + k) for k, content in names}
                return self._replaced(text, table), first
        raise AmbiguousControlTokens(
            "control tokens' texts cannot be told from its private-use characters"
        )

    def encode(self, text: str, first: int, multithreaded: bool) -> np.ndarray:
        """The ids, int32 [n], of a text with placeholders from `first` on. Raises
        AmbiguousControlTokens. `multithreaded`: as for PromptEncoder."""
        if first not in self._by_plane:
            self._by_plane[first] = self._make_tokenizer(first)
        built = self._by_plane[first]
        if multithreaded:
            (encoding,) = built.tokenizer.encode_batch_fast([text], add_special_tokens=False)
        else:
            encoding = built.tokenizer.encode(text, add_special_tokens=False)
        ids = np.asarray(encoding.ids, dtype="<i4")
        if int(built.is_placeholder[ids].sum()) != len(
            self._placeholder_pattern(first).findall(text)
        ):
            raise AmbiguousControlTokens(
                "the tokenizer does not keep control tokens and their texts apart"
            )
        return built.checkpoint_ids[ids]

    def _replaced(self, text: str, table: dict[str, str]) -> str:
        return self._added_pattern.sub(lambda found: table.get(found[0], found[0]), text)

    def _placeholder_pattern(self, first: int) -> re.Pattern[str]:
        return re.compile(f"[{chr(first)}-{chr(first + len(self._special) - 1)}]")

    def _make_tokenizer(self, first: int) -> _PlaneTokenizer:
        built = Tokenizer(self._tokenizer.model)  # shared, not copied
        if self._tokenizer.normalizer is not None:
            built.normalizer = self._tokenizer.normalizer
        if self._tokenizer.pre_tokenizer is not None:
            built.pre_tokenizer = self._tokenizer.pre_tokenizer
        tokens = [
            AddedToken(
                chr(first + k), special=True, lstrip=token.lstrip, rstrip=token.rstrip,
                normalized=token.normalized,
            )
            for k, (_, token) in enumerate(self._special)
        ]  # fmt: skip
        tokens += [token for _, token in self._non_special]
        # A bare list in the library's stub.
        built.add_tokens(tokens)  # pyright: ignore[reportUnknownMemberType]
        ids = {token.content: i for i, token in built.get_added_tokens_decoder().items()}
        size = max([*ids.values(), built.get_vocab_size()]) + 1
        names, controls = np.arange(size, dtype="<i4"), np.zeros(size, dtype=bool)
        for k, (checkpoint, _) in enumerate(self._special):
            names[ids[chr(first + k)]], controls[ids[chr(first + k)]] = checkpoint, True
        for checkpoint, token in self._non_special:
            names[ids[token.content]] = checkpoint
        return _PlaneTokenizer(built, names, controls)


def may_fold_into_special(tokenizer: Tokenizer) -> bool:
    """Whether texts other than its own may become a special token: it is looked for in normalized
    text, and more than white space is normalized."""
    added = tokenizer.get_added_tokens_decoder().values()
    if not any(token.special and token.normalized for token in added):
        return False
    return any(
        one.type != "Prepend" and one.pattern != {"String": " "}
        for one in components(tokenizer.normalizer)
    )


class Component(msgspec.Struct, frozen=True):
    """A normalizer or pre-tokenizer, with those fields of tokenizer.json that matter here."""

    type: str
    pattern: dict[str, str] = {}
    content: str = ""
    behavior: str = ""
    normalizers: list[Component] = []  # of a sequence, as the next one
    pretokenizers: list[Component] = []


def components(component: Normalizer | PreTokenizer | None) -> list[Component]:
    """The parts of a normalizer or pre-tokenizer, with sequences flattened; [] for None."""
    if component is None:
        return []
    waiting = [msgspec.json.decode(component.__getstate__(), type=Component)]
    components: list[Component] = []
    while waiting:
        one = waiting.pop(0)
        if one.type == "Sequence":
            waiting = [*one.normalizers, *one.pretokenizers, *waiting]
        else:
            components.append(one)
    return components
