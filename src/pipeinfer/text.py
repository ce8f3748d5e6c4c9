"""A checkpoint's tokenizer files, the special tokens they name, and the tags of reasoning parsers.

`load_tokenizer` gives the same ids as the tokenizer that transformers loads from the folder,
without importing transformers. `added_tokens` reads tokens such as `</think>` without building the
tokenizer, for processes that encode nothing. If files contradict each other about a token, the same
file wins as in transformers' AutoTokenizer.

The tags around reasoning belong to the model: --reasoning-parser names them, or the chat template
shows them. `reasoning_state` finds for each rendered prompt whether it leaves them open.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from pipeinfer.checkpoint.config import read_generation, read_outline
from pipeinfer.checkpoint.files import read_object
from pipeinfer.gguf.config import tokenizer as gguf_tokenizer
from pipeinfer.gguf.header import is_gguf
from pipeinfer.grammars.bounds import VocabularySetup
from pipeinfer.params import JsonObject, JsonValue, ReasoningState
from pipeinfer.settings import ConfigurationError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SPACE = " \t\r\n"


class ReasoningTags(NamedTuple):
    """The tags of a reasoning parser.

    Attributes:
    - opening, closing: tags around the reasoning
    - answer: tags around the answer after the reasoning, which the content leaves out; ("", ""):
      the model has none
    - never: marks of a chat template in which the `answer` tags stand around other texts, such as
      results of tools; `parser_of` passes over the parser then
    """

    opening: str
    closing: str
    answer: tuple[str, str] = ("", "")
    never: tuple[str, ...] = ()

    @property
    def pair(self) -> tuple[str, str]:
        """The tags around the reasoning, (opening, closing)."""
        return self.opening, self.closing


THINK = ReasoningTags("<think>", "</think>")
COHERE = "<|START_THINKING|>", "<|END_THINKING|>"
# By vLLM's names of the parsers. The order matters: see `parser_of`.
REASONING_PARSERS: dict[str, ReasoningTags] = {
    "hunyuan_a13b": ReasoningTags(*THINK.pair, ("<answer>", "</answer>")),
    "ernie45": ReasoningTags(*THINK.pair, ("<response>", "</response>"), ("<minimax:tool_call>",)),
    **dict.fromkeys(
        (
            "qwen3", "deepseek_r1", "deepseek_v3", "deepseek_v4", "glm45", "glm47",
            "granite_thinking_parser", "holo2", "kimi_k2", "ling3", "mimo", "minicpmv",
            "minimax_m2", "nemotron_v3", "olmo3", "poolside_v1", "step3", "step3p5", "step5",
        ),
        THINK,
    ),
    "seed_oss": ReasoningTags("<seed:think>", "</seed:think>"),
    "mistral": ReasoningTags("[THINK]", "[/THINK]"),
    "minimax_m3": ReasoningTags("<mm:think>", "</mm:think>"),
    "cohere_command3": ReasoningTags(*COHERE, ("<|START_RESPONSE|>", "<|END_RESPONSE|>")),
    "cohere_command4": ReasoningTags(*COHERE, ("<|START_TEXT|>", "<|END_TEXT|>")),
    "plamo3": ReasoningTags("<|plamo:begin_think:plamo|>", "<|plamo:end_think:plamo|>"),
    "granite": ReasoningTags("Here is my thought process:", "Here is my response:"),
}  # fmt: skip


def parser_of(template: str) -> str:
    """The reasoning parser that a chat template implies; "": none.

    The result is the first of REASONING_PARSERS with these properties: the template has both
    `answer` tags, no mark of `never`, and at least one of `opening` and `closing`.
    """
    for name, tags in REASONING_PARSERS.items():
        answers = all(tag in template for tag in tags.answer)
        others = any(mark in template for mark in tags.never)
        if answers and not others and any(tag in template for tag in tags.pair):
            return name
    return ""


def reasoning_tags(parser: str, template: str) -> ReasoningTags | None:
    """The tags of a reasoning parser; None: there are none.

    - parser: the setting: a name of REASONING_PARSERS, "auto" or "none"
    - template: the text of the chat template, which decides for "auto"
    """
    return REASONING_PARSERS.get(parser_of(template) if parser == "auto" else parser)


def reasoning_state(prompt: str, tags: ReasoningTags) -> ReasoningState:
    """The state of the reasoning at the end of a rendered prompt.

    - "open": the last opening tag stands after the last closing tag.
    - "over": the prompt ends with the closing tag, but for white space.
    - "before": in all other cases. A closing tag further up belongs to an earlier answer.
    """
    opened, closed = prompt.rfind(tags.opening), prompt.rfind(tags.closing)
    if opened > closed:
        return "open"
    return "over" if prompt.rstrip(SPACE).endswith(tags.closing) else "before"


def content_text(content: JsonValue) -> str:
    """The text of a message's content: the text parts of a list, joined."""
    if isinstance(content, list):
        return "".join(str(part.get("text")) for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


START, END, MESSAGE = "<|start|>", "<|end|>", "<|message|>"
CHANNEL, CONSTRAIN = "<|channel|>", "<|constrain|>"
RETURN, CALL = "<|return|>", "<|call|>"
# Tokens that end a harmony answer: its last message is over, or a tool call waits for its result.
# END only ends one message.
HARMONY_ENDS = (RETURN, CALL)
# A tokenizer that has all of these as special tokens knows harmony. Some lack <|constrain|>.
HARMONY_TOKENS = frozenset((START, END, MESSAGE, CHANNEL, *HARMONY_ENDS))


NAMED_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


class AddedId(NamedTuple):
    """An added token.

    Attributes:
    - id: the token's id
    - special: whether the token controls the model, and is left out of decoded text
    """

    id: int
    special: bool


class TokenFlags(NamedTuple):
    """An added token's text and its flags, as in the tokenizers library's AddedToken."""

    content: str
    special: bool
    single_word: bool
    lstrip: bool
    rstrip: bool
    normalized: bool


class _InFile(msgspec.Struct):
    """An entry of `added_tokens` in tokenizer.json."""

    id: int
    content: str
    special: bool = False
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False


class _Tokenizer(msgspec.Struct):
    added_tokens: list[_InFile] = []


def special_tokens(config: JsonObject) -> dict[str, str]:
    """Texts of the named tokens by name, such as {"eos_token": "</s>"}: those of NAMED_TOKENS, and
    names that only this model has.

    - config: as `read_tokenizer_config` returns it
    """
    named = {name: config[name] for name in NAMED_TOKENS if config.get(name) is not None}
    for name, token in config.items():  # names that only some models have, such as image_token
        if name.endswith("_token") and name not in named and _is_token(token):
            named[name] = token
    extra = config.get("extra_special_tokens")
    if isinstance(extra, dict):
        named.update(extra)
    return {name: text_of(token) for name, token in named.items() if token is not None}


def tokens_by_files(
    folder: Path, config: JsonObject, own: Mapping[int, TokenFlags]
) -> list[tuple[int, TokenFlags]]:
    """(id, flags) of each token to be added to a tokenizer, in the order of adding. The id is -1 if
    no file has it. Raises ConfigurationError.

    - folder: of the checkpoint
    - config: as `read_tokenizer_config` returns it
    - own: the added tokens of tokenizer.json, by id. They keep their ids, and take the flags
      returned here
    """
    named = special_tokens(config)
    listed = _listed(config)
    decoder = config.get("added_tokens_decoder")
    if isinstance(decoder, dict):
        given = [(n, t) for n, t in decoder.items() if n.isdecimal() and _is_token(t)]
        by_id = {int(n): _token(t, named.values()) for n, t in given}
    else:
        special = {*(named[name] for name in NAMED_TOKENS if name in named), *map(text_of, listed)}
        by_id = {
            number: TokenFlags(
                content, content in special, False, False, False, content not in special
            )
            for content, number in (read_object(folder, "added_tokens.json") or {}).items()
            if isinstance(number, int)
        }
        by_id = {
            number: token._replace(special=token.special or token.content in named.values())
            for number, token in (by_id | dict(own)).items()
        }
    found = sorted(by_id.items())
    contents = {token.content for token in (*own.values(), *by_id.values())}
    others = (*(config.get(name) or text for name, text in named.items()), *listed)
    found += [(-1, _token(t, named.values())) for t in others if text_of(t) not in contents]
    return found


def added_tokens(folder: Path, config: JsonObject) -> dict[str, AddedId]:
    """The added tokens of a checkpoint, by text. Raises ConfigurationError for a file that cannot
    be read.

    - folder: of the checkpoint
    - config: as `read_tokenizer_config` returns it
    """
    path = folder / "tokenizer.json"
    tokens: list[_InFile] = []
    if path.is_file():
        try:
            tokens = msgspec.json.decode(path.read_bytes(), type=_Tokenizer).added_tokens
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"cannot read {path}: {error}") from None
    own = {
        t.id: TokenFlags(t.content, t.special, t.single_word, t.lstrip, t.rstrip, t.normalized)
        for t in tokens
    }
    found = {token.content: AddedId(number, token.special) for number, token in own.items()}
    for number, token in tokens_by_files(folder, config, own):
        known = found.get(token.content)
        if known is not None:
            found[token.content] = known._replace(special=token.special)
        elif number >= 0:
            found[token.content] = AddedId(number, token.special)
    return found


def text_of(token: JsonValue) -> str:
    """The text of a token: the token itself, or the `content` of an object."""
    return str(token["content"]) if isinstance(token, dict) else str(token)


def _listed(config: JsonObject) -> list[JsonValue]:
    """The special tokens without a name: `extra_special_tokens` or `additional_special_tokens`."""
    extra = config.get("extra_special_tokens")
    given = extra if extra and isinstance(extra, list) else config.get("additional_special_tokens")
    return list(given) if isinstance(given, list) else []


def _is_token(token: JsonValue) -> bool:
    return isinstance(token, str) or (isinstance(token, dict) and "content" in token)


def _token(token: JsonValue, named: Collection[str]) -> TokenFlags:
    """The flags of a token of a file. Special tokens are matched before a text is normalized,
    unless their flags state otherwise.

    - token: a text, which is a special token, or an object with flags
    - named: texts of the named tokens, which are special, too
    """
    flags = token if isinstance(token, dict) else JsonObject(special=True)
    special = flags.get("special") is True or text_of(token) in named
    return TokenFlags(
        text_of(token),
        special,
        flags.get("single_word") is True,
        flags.get("lstrip") is True,
        flags.get("rstrip") is True,
        flags.get("normalized", not special) is True,
    )


def read_tokenizer_config(folder: Path) -> JsonObject:
    """The object in tokenizer_config.json, completed by special_tokens_map.json.

    If tokenizer_config.json has `added_tokens_decoder`, it is complete by itself. Otherwise the map
    adds tokens that it lacks, and the flags of tokens that it names by text alone.
    """
    config = read_object(folder, "tokenizer_config.json") or {}
    if isinstance(config.get("added_tokens_decoder"), dict):
        return config
    merged = dict(config)
    for name, token in (read_object(folder, "special_tokens_map.json") or {}).items():
        if isinstance(token, dict) and "content" in token:
            token = {**token, "special": True}
            if merged.get(name) in (None, token["content"]):
                merged[name] = token
        elif merged.get(name) is None:
            merged[name] = token
    return merged


def template_sources(folder: Path, config: JsonObject, override: str) -> dict[str, str]:
    """The checkpoint's chat templates, Jinja text by name; "default" is the usual one. Raises
    ConfigurationError for a file that cannot be read.

    - folder: of the checkpoint. chat_template.jinja there replaces the templates of `config`
    - config: the tokenizer's configuration
    - override: path of a template file, to be used instead of all others; "": none
    """
    if override:
        return {"default": _read_template(Path(override))}
    sources: dict[str, str] = {}
    given = config.get("chat_template")
    if isinstance(given, str):
        sources["default"] = given
    elif isinstance(given, list):
        named = [entry for entry in given if isinstance(entry, dict)]
        sources = {str(entry["name"]): str(entry["template"]) for entry in named}
    if (folder / "chat_template.jinja").exists():
        sources = {"default": _read_template(folder / "chat_template.jinja")}
        for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
            sources[path.stem] = _read_template(path)
    return sources


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"cannot read chat template {path}: {error}") from None


# Fields with names of files. Some are paths on the machine that saved the checkpoint, so
# `tokenizer_info` leaves them out.
OF_FILES = (
    "auto_map",
    "merges_file",
    "name_or_path",
    "special_tokens_map_file",
    "tokenizer_file",
    "vocab_file",
)
LONGEST = 2**53  # tokens; a larger model_max_length, such as 10**30, means that there is no bound


def tokenizer_info(config: JsonObject, templates: Mapping[str, str], context_length: int) -> bytes:
    """The tokenizer's configuration as a JSON object, for clients. It has all names of
    NAMED_TOKENS, as texts; null: the tokenizer has no such token.

    - config: as `read_tokenizer_config` returns it
    - templates: as `template_sources` returns them
    - context_length: tokens; used if `model_max_length` is missing; 0: not known
    """
    fields: JsonObject = {name: value for name, value in config.items() if name not in OF_FILES}
    fields |= dict.fromkeys(NAMED_TOKENS) | special_tokens(config)
    fields["tokenizer_class"] = config.get("tokenizer_class") or "PreTrainedTokenizerFast"
    fields["chat_template"] = templates.get("default")
    most = config.get("model_max_length")
    if not isinstance(most, int) or not 0 < most <= LONGEST:
        fields["model_max_length"] = context_length or None
    return json.dumps(fields).encode()


def load_tokenizer(folder: Path, config: JsonObject) -> Tokenizer | None:
    """The tokenizer of a checkpoint; None if there is no tokenizer.json. Raises ConfigurationError
    for a broken file.

    - config: as `read_tokenizer_config` returns it. Its `add_bos_token` and `add_eos_token` are
      ignored: tokenizer.json defines how a prompt begins and ends
    """
    tokenizer = _read_tokenizer(folder)
    if tokenizer is None:
        return None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    _add_tokens(tokenizer, folder, config)
    return tokenizer


def _read_tokenizer(folder: Path) -> Tokenizer | None:
    if is_gguf(folder):
        return gguf_tokenizer(folder)
    from tokenizers import Tokenizer  # takes 0.1 s; the gateway never gets here

    path = folder / "tokenizer.json"
    try:
        return Tokenizer.from_file(str(path)) if path.exists() else None
    except Exception as error:  # the library raises bare Exception
        raise ConfigurationError(f"cannot read {path}: {error}") from None


def _add_tokens(tokenizer: Tokenizer, folder: Path, config: JsonObject) -> None:
    """Adds tokens that only files besides tokenizer.json have, and updates the flags of its own."""
    own = {
        n: TokenFlags(t.content, t.special, t.single_word, t.lstrip, t.rstrip, t.normalized)
        for n, t in tokenizer.get_added_tokens_decoder().items()
    }
    from tokenizers import AddedToken

    adding = [AddedToken(**t._asdict()) for _, t in tokens_by_files(folder, config, own)]
    # A bare list in the library's stub.
    tokenizer.add_tokens(adding)  # pyright: ignore[reportUnknownMemberType]


def read_end_ids(folder: Path, tokenizer: Tokenizer | None, config: JsonObject) -> tuple[int, ...]:
    """Ids of the tokens that end a request: those of config.json and generation_config.json, the
    tokenizer's eos_token, and the ends of a harmony answer.

    - config: as `read_tokenizer_config` returns it
    """
    ids = dict.fromkeys(read_generation(folder).eos_ids)
    text = special_tokens(config).get("eos_token")
    token = tokenizer.token_to_id(text) if tokenizer is not None and text is not None else None
    if token is not None:
        ids[token] = None
    if tokenizer is not None:
        ids |= dict.fromkeys(_harmony_end_ids(tokenizer))
    return tuple(ids)


def grammar_setup(folder: Path, model_impl: str = "auto") -> VocabularySetup:
    """The arguments of a GrammarVocabulary for the checkpoint in `folder`. Raises
    ConfigurationError if the checkpoint has no tokenizer or no end token.

    - model_impl: as in Settings
    """
    config = read_tokenizer_config(folder)
    tokenizer = load_tokenizer(folder, config)
    end_ids = read_end_ids(folder, tokenizer, config)
    return vocabulary_setup(tokenizer, read_outline(folder, model_impl).vocab_size, end_ids)


def vocabulary_setup(
    tokenizer: Tokenizer | None, width: int, end_ids: Sequence[int]
) -> VocabularySetup:
    """The arguments of a GrammarVocabulary for a model. Raises ConfigurationError without a
    tokenizer or an end token.

    - width: the model's vocabulary size, the width of its logits
    - end_ids: ids that end a request; those outside of the vocabulary are dropped
    """
    if tokenizer is None:
        raise ConfigurationError("the checkpoint has no tokenizer")
    end_ids = tuple(i for i in end_ids if 0 <= i < width)
    if not end_ids:
        raise ConfigurationError("the checkpoint names no token that ends a text")
    return VocabularySetup(
        tokenizer=tokenizer.to_str(),
        width=width,
        end_ids=end_ids,
        known_ids=tuple(sorted(tokenizer.get_vocab().values())),
    )


def _harmony_end_ids(tokenizer: Tokenizer) -> list[int]:
    """Ids of HARMONY_ENDS if the tokenizer has HARMONY_TOKENS as special tokens, else none. Needed
    because some checkpoints name only one of them as end token, or another token.
    """
    added = tokenizer.get_added_tokens_decoder()
    special = {token.content: i for i, token in added.items() if token.special}
    if not special.keys() >= HARMONY_TOKENS:
        return []
    return [special[text] for text in HARMONY_ENDS]
