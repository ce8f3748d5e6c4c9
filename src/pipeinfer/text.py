"""A checkpoint's tokenizer files, the tokens they name, and the tags that models think between.

Gives the same ids as the tokenizer that transformers would load from the folder, without importing
transformers. Tokens that files add by name, such as `</think>`, are read without the tokenizer, for
who need not encode anything; where files say different things of a token, those win that win in
transformers' AutoTokenizer.

Tags of thoughts are a property of the model: named by --reasoning-parser, or seen in its chat
template. Whether they are open is a property of each rendered prompt. Knows no request.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from pipeinfer.checkpoint.config import read_generation, read_outline
from pipeinfer.checkpoint.fields import read_object
from pipeinfer.gguf.config import tokenizer as gguf_tokenizer
from pipeinfer.gguf.header import is_gguf
from pipeinfer.grammars.bounds import VocabularySetup
from pipeinfer.json_values import JsonObject, JsonValue
from pipeinfer.params import ThoughtState
from pipeinfer.settings import ConfigurationError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SPACE = " \t\r\n"


class ThoughtTags(NamedTuple):
    """Texts around the thoughts. `answer`: those around what the model says behind them, which is
    content without them; none if it has no such tags. `never`: what a template has only where
    `answer` stands around something else, such as the results of tools."""

    opening: str
    closing: str
    answer: tuple[str, str] = ("", "")
    never: tuple[str, ...] = ()

    @property
    def pair(self) -> tuple[str, str]:
        """Around the thoughts."""
        return self.opening, self.closing


THINK = ThoughtTags("<think>", "</think>")
COHERE = "<|START_THINKING|>", "<|END_THINKING|>"
# By the names that vLLM has for them. A template shows the first one of which it has all tags of
# answers, and a tag of thoughts.
REASONING_PARSERS: dict[str, ThoughtTags] = {
    "hunyuan_a13b": ThoughtTags(*THINK.pair, ("<answer>", "</answer>")),
    "ernie45": ThoughtTags(*THINK.pair, ("<response>", "</response>"), ("<minimax:tool_call>",)),
    **dict.fromkeys(
        (
            "qwen3", "deepseek_r1", "deepseek_v3", "deepseek_v4", "glm45", "glm47",
            "granite_thinking_parser", "holo2", "kimi_k2", "ling3", "mimo", "minicpmv",
            "minimax_m2", "nemotron_v3", "olmo3", "poolside_v1", "step3", "step3p5", "step5",
        ),
        THINK,
    ),
    "seed_oss": ThoughtTags("<seed:think>", "</seed:think>"),
    "mistral": ThoughtTags("[THINK]", "[/THINK]"),
    "minimax_m3": ThoughtTags("<mm:think>", "</mm:think>"),
    "cohere_command3": ThoughtTags(*COHERE, ("<|START_RESPONSE|>", "<|END_RESPONSE|>")),
    "cohere_command4": ThoughtTags(*COHERE, ("<|START_TEXT|>", "<|END_TEXT|>")),
    "plamo3": ThoughtTags("<|plamo:begin_think:plamo|>", "<|plamo:end_think:plamo|>"),
    "granite": ThoughtTags("Here is my thought process:", "Here is my response:"),
}  # fmt: skip


def parser_of(template: str) -> str:
    """The name of the tags that a chat template shows; none if it shows none."""
    for name, tags in REASONING_PARSERS.items():
        answers = all(tag in template for tag in tags.answer)
        others = any(mark in template for mark in tags.never)
        if answers and not others and any(tag in template for tag in tags.pair):
            return name
    return ""


def thought_tags(parser: str, template: str) -> ThoughtTags | None:
    """For a setting that names a parser, "auto" or "none", and the text of a chat template."""
    return REASONING_PARSERS.get(parser_of(template) if parser == "auto" else parser)


def thought_state(prompt: str, tags: ThoughtTags) -> ThoughtState:
    """Where a prompt leaves the thoughts of the answer: open where the opening tag comes last, over
    where it ends with the closing tag. One that stands further up belongs to another answer."""
    opened, closed = prompt.rfind(tags.opening), prompt.rfind(tags.closing)
    if opened > closed:
        return "open"
    return "over" if prompt.rstrip(SPACE).endswith(tags.closing) else "before"


def content_text(content: JsonValue) -> str:
    """The text of a message's content, whose parts go on from each other."""
    if isinstance(content, list):
        return "".join(str(part.get("text")) for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


START, END, MESSAGE = "<|start|>", "<|end|>", "<|message|>"
CHANNEL, CONSTRAIN = "<|channel|>", "<|constrain|>"
RETURN, CALL = "<|return|>", "<|call|>"
# What ends an answer: its last message, or a call that waits for a result. END does not.
HARMONY_ENDS = (RETURN, CALL)
# Of a tokenizer that has the format; <|constrain|> some leave out.
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
    """`special`: it controls the model, and has no text of its own."""

    id: int
    special: bool


class TokenFlags(NamedTuple):
    """A token with the flags that the tokenizers library knows."""

    content: str
    special: bool
    single_word: bool
    lstrip: bool
    rstrip: bool
    normalized: bool


class _InFile(msgspec.Struct):
    """One of tokenizer.json's."""

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
    """{"eos_token": "</s>", ...}: the named tokens as text, also the model's own named ones."""
    named = {name: config[name] for name in NAMED_TOKENS if config.get(name) is not None}
    for name, token in config.items():  # image_token, and whatever else a model calls one
        if name.endswith("_token") and name not in named and _is_token(token):
            named[name] = token
    extra = config.get("extra_special_tokens")
    if isinstance(extra, dict):
        named.update(extra)
    return {name: text_of(token) for name, token in named.items() if token is not None}


def tokens_by_files(
    folder: Path, config: JsonObject, own: Mapping[int, TokenFlags]
) -> list[tuple[int, TokenFlags]]:
    """Every added token with its flags, in the order in which they are to be added to `own`,
    tokenizer.json's by their ids: those that are there keep their place and take the flags. The ids
    are those of the files, -1 where they say none. `config`: what read_tokenizer_config gave.
    Raises ConfigurationError."""
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
    """By their text. `config`: what read_tokenizer_config gave. Raises ConfigurationError for a
    file that cannot be read."""
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
    """Of a text, or of an object that has one as its content."""
    return str(token["content"]) if isinstance(token, dict) else str(token)


def _listed(config: JsonObject) -> list[JsonValue]:
    """Special tokens without a name."""
    extra = config.get("extra_special_tokens")
    given = extra if extra and isinstance(extra, list) else config.get("additional_special_tokens")
    return list(given) if isinstance(given, list) else []


def _is_token(token: JsonValue) -> bool:
    return isinstance(token, str) or (isinstance(token, dict) and "content" in token)


def _token(token: JsonValue, named: Collection[str]) -> TokenFlags:
    """A text alone is one of the special ones', and so is whatever has a name. Special tokens are
    looked for before a text is normalized, unless they say otherwise."""
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
    """tokenizer_config.json; tokens that it does not name, and flags of those that it only names,
    come from special_tokens_map.json, unless it says itself which tokens are added."""
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
    """Jinja text by name, of the checkpoint in `folder`, or only that of the file `override` if it
    is not empty. A file chat_template.jinja goes before the text in `config`, the tokenizer's
    configuration. Raises ConfigurationError for a file that cannot be read.
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


# Names of files and folders, of which some are paths on the machine that saved the checkpoint.
OF_FILES = (
    "auto_map",
    "merges_file",
    "name_or_path",
    "special_tokens_map_file",
    "tokenizer_file",
    "vocab_file",
)
LONGEST = 2**53  # tokens; files say 10**30 where a tokenizer has no bound of its own


def tokenizer_info(config: JsonObject, templates: Mapping[str, str], context_length: int) -> bytes:
    """As JSON. `config`: what read_tokenizer_config gave, `templates`: what template_sources gave;
    `context_length`: tokens, 0 if not known. Named tokens are texts, null where there is none."""
    told: JsonObject = {name: value for name, value in config.items() if name not in OF_FILES}
    told |= dict.fromkeys(NAMED_TOKENS) | special_tokens(config)
    told["tokenizer_class"] = config.get("tokenizer_class") or "PreTrainedTokenizerFast"
    told["chat_template"] = templates.get("default")
    most = config.get("model_max_length")
    if not isinstance(most, int) or not 0 < most <= LONGEST:
        told["model_max_length"] = context_length or None
    return json.dumps(told).encode()


def load_tokenizer(folder: Path, config: JsonObject) -> Tokenizer | None:
    """The tokenizer of a checkpoint, or None where there is no tokenizer.json.

    `config`: what `read_tokenizer_config` gave; of `add_bos_token` and `add_eos_token` there,
    tokenizer.json knows better. Raises ConfigurationError for a broken file.
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
    from tokenizers import Tokenizer  # 0.1 s, which the gateway need not pay

    path = folder / "tokenizer.json"
    try:
        return Tokenizer.from_file(str(path)) if path.exists() else None
    except Exception as error:  # the library raises bare Exception
        raise ConfigurationError(f"cannot read {path}: {error}") from None


def _add_tokens(tokenizer: Tokenizer, folder: Path, config: JsonObject) -> None:
    """Tokens that only other files know, and the flags that they say of those that are there."""
    own = {
        n: TokenFlags(t.content, t.special, t.single_word, t.lstrip, t.rstrip, t.normalized)
        for n, t in tokenizer.get_added_tokens_decoder().items()
    }
    from tokenizers import AddedToken

    adding = [AddedToken(**t._asdict()) for _, t in tokens_by_files(folder, config, own)]
    # A bare list in the library's stub.
    tokenizer.add_tokens(adding)  # pyright: ignore[reportUnknownMemberType]


def read_end_ids(folder: Path, tokenizer: Tokenizer | None, config: JsonObject) -> tuple[int, ...]:
    """The union of what config.json, generation_config.json and the tokenizer say, and of what ends
    a harmony answer; `config`: what read_tokenizer_config gave."""
    ids = dict.fromkeys(read_generation(folder).eos_ids)
    text = special_tokens(config).get("eos_token")
    token = tokenizer.token_to_id(text) if tokenizer is not None and text is not None else None
    if token is not None:
        ids[token] = None
    if tokenizer is not None:
        ids |= dict.fromkeys(_harmony_ends(tokenizer))
    return tuple(ids)


def grammar_setup(folder: Path, model_impl: str = "auto") -> VocabularySetup:
    """For grammars of the checkpoint in `folder`; `model_impl` as in Settings. Raises
    ConfigurationError where it has no tokenizer or no end."""
    config = read_tokenizer_config(folder)
    tokenizer = load_tokenizer(folder, config)
    ends = read_end_ids(folder, tokenizer, config)
    return vocabulary_setup(tokenizer, read_outline(folder, model_impl).vocab_size, ends)


def vocabulary_setup(
    tokenizer: Tokenizer | None, width: int, ends: Sequence[int]
) -> VocabularySetup:
    """For grammars of a model with logits of `width` ids, `ends` of which end a text. Raises
    ConfigurationError."""
    if tokenizer is None:
        raise ConfigurationError("the checkpoint has no tokenizer")
    ends = tuple(i for i in ends if 0 <= i < width)
    if not ends:
        raise ConfigurationError("the checkpoint names no token that ends a text")
    return VocabularySetup(
        tokenizer=tokenizer.to_str(),
        width=width,
        end_ids=ends,
        known_ids=tuple(sorted(tokenizer.get_vocab().values())),
    )


def _harmony_ends(tokenizer: Tokenizer) -> list[int]:
    """Ids of ENDS, where the tokenizer has the format's tokens as special ones; else none. Some
    checkpoints name only one of them, or another token."""
    added = tokenizer.get_added_tokens_decoder()
    special = {token.content: i for i, token in added.items() if token.special}
    if not special.keys() >= HARMONY_TOKENS:
        return []
    return [special[text] for text in HARMONY_ENDS]
