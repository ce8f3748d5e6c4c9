"""A GGUF file's tokenizer as the objects of tokenizer.json and tokenizer_config.json.

Supported models are byte-level BPE ("gpt2") and SentencePiece's BPE ("llama"). Takes the metadata,
reads no file.
"""

from __future__ import annotations

import json
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple, TypedDict, cast

from pipeinfer.gguf.header import (
    Metadata,
    metadata_error,
    quote,
    read_flag,
    read_index,
    read_integers,
    read_numbers,
    read_text,
    read_texts,
)
from pipeinfer.settings import ConfigurationError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MODEL = "tokenizer.ggml.model"
BYTE_LEVEL, SENTENCE_PIECE = "gpt2", "llama"
ADD_BOS, ADD_EOS = "tokenizer.ggml.add_bos_token", "tokenizer.ggml.add_eos_token"
PREFIX, TRIM = "tokenizer.ggml.add_space_prefix", "tokenizer.ggml.remove_extra_whitespaces"
TEMPLATE = "tokenizer.chat_template"
SPACE = "\u2581"  # stands for a space in SentencePiece's tokens
# Ids of SentencePiece's named tokens where the file does not have them.
SENTENCE_PIECE_IDS = {"unk_token": 0, "bos_token": 1, "eos_token": 2}

Json = dict[str, object]


class _AddedIds(NamedTuple):
    """The special tokens around each prompt, as texts; None: there is none.

    Attributes:
    - bos: in front
    - eos: behind
    """

    bos: str | None
    eos: str | None


def tokenizer_json(metadata: Metadata) -> Json:
    """The object of tokenizer.json; `Tokenizer.from_str` reads it as JSON.

    - metadata: the file's key-values. Lists in the result share its texts

    The tokenizer gives the ids of the model's own. Raises ConfigurationError for a model or
    pre-tokenizer that is not supported, and for metadata that is incomplete or contradicts itself.
    """
    model = _model(metadata)
    vocabulary = _vocabulary(metadata, model)
    if model == BYTE_LEVEL:
        return _byte_level(metadata, vocabulary)
    return _sentence_piece(metadata, vocabulary)


def tokenizer_config(metadata: Metadata) -> Json:
    """The object of tokenizer_config.json: texts of the named tokens, and chat templates.

    Raises ConfigurationError as `tokenizer_json` does.
    """
    vocabulary = _vocabulary(metadata, _model(metadata))
    named = {name: vocabulary.tokens[number] for name, number in vocabulary.named.items()}
    templates = _templates(metadata)
    if not templates:
        return {**named}
    if list(templates) == ["default"]:
        return {**named, "chat_template": templates["default"]}
    listed = [{"name": name, "template": text} for name, text in templates.items()]
    return {**named, "chat_template": listed}


def _model(metadata: Metadata) -> str:
    model = read_text(metadata, MODEL)
    if model is None:
        raise metadata_error(MODEL, "missing")
    if model not in (BYTE_LEVEL, SENTENCE_PIECE):
        known = f"{BYTE_LEVEL}, {SENTENCE_PIECE}"
        raise metadata_error(MODEL, f"{quote(model)} is not known, only: {known}")
    return model


def _vocabulary(metadata: Metadata, model: str) -> GgufVocabulary:
    vocabulary = read_vocabulary(metadata)
    if model == BYTE_LEVEL:
        return vocabulary
    size = len(vocabulary.tokens)
    usual = {name: number for name, number in SENTENCE_PIECE_IDS.items() if number < size}
    vocabulary = vocabulary._replace(named={**usual, **vocabulary.named})
    return vocabulary if read_flag(metadata, PREFIX, True) else _spelled(vocabulary)


def _spelled(vocabulary: GgufVocabulary) -> GgufVocabulary:
    """Writes the spaces in USER_DEFINED tokens, such as Gemma's tokens for indentation, as SPACE.

    The file has them as plain spaces, but SentencePiece looks for these tokens after it has
    replaced the spaces of the text.
    """
    tokens = list(vocabulary.tokens)
    for number in vocabulary.of_kinds(frozenset((TokenType.USER_DEFINED,))):
        spelled = tokens[number].replace(" ", SPACE)
        if spelled not in vocabulary.ids:
            tokens[number] = spelled
    ids = {token: number for number, token in enumerate(tokens)}
    return vocabulary._replace(tokens=tokens, ids=ids) if len(ids) == len(tokens) else vocabulary


def _templates(metadata: Metadata) -> dict[str, str]:
    """Chat templates, Jinja text by name: "default", and the rest of each key that begins with
    TEMPLATE and a dot.
    """
    templates = {}
    default = read_text(metadata, TEMPLATE)
    if default is not None:
        templates["default"] = default
    for key in sorted(key for key in metadata if key.startswith(TEMPLATE + ".")):
        text = read_text(metadata, key)
        if text is not None:
            templates.setdefault(key.removeprefix(TEMPLATE + "."), text)
    return templates


def _byte_level(metadata: Metadata, vocabulary: GgufVocabulary) -> Json:
    rule = read_pre_tokenizer(metadata)
    added = _added_ids(metadata, vocabulary, rule.add_bos)
    model = _bpe(vocabulary, listed_merges(metadata, vocabulary))
    model["ignore_merges"] = rule.whole_words
    return _tokenizer(
        model,
        _added(vocabulary, replaced=False),
        _template(vocabulary, added),
        normalizer={"type": "NFC"} if rule.nfc else None,
        pre_tokenizer=_splits(rule),
        decoder=_BYTES,
    )


_BYTES: Json = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": False,
}


def _splits(rule: PreTokenizer) -> Json:
    isolated: Json = {"type": "Split", "behavior": "Isolated", "invert": False}
    splits: list[Json] = [{**isolated, "pattern": {"Regex": split}} for split in rule.splits]
    return {"type": "Sequence", "pretokenizers": [*splits, _BYTES]}


def _sentence_piece(metadata: Metadata, vocabulary: GgufVocabulary) -> Json:
    prefix = read_flag(metadata, PREFIX, True)
    trim = read_flag(metadata, TRIM, False)
    added = _added_ids(metadata, vocabulary, add_bos=True)
    _check_bytes(vocabulary)
    model = _bpe(vocabulary, scored_merges(metadata, vocabulary))
    model |= {"byte_fallback": True, "fuse_unk": True}
    if "unk_token" in vocabulary.named:
        model["unk_token"] = vocabulary.tokens[vocabulary.named["unk_token"]]
    return _tokenizer(
        model,
        # With a prefix, normalizing the tokens would put the prefix in front of each of them.
        _added(vocabulary, replaced=not prefix),
        _template(vocabulary, added),
        normalizer={"type": "Sequence", "normalizers": _normalizers(prefix, trim)},
        pre_tokenizer=None,
        decoder={"type": "Sequence", "decoders": _decoders(prefix)},
    )


def _normalizers(prefix: bool, trim: bool) -> list[Json]:
    components: list[Json] = []
    if trim:
        components.append({"type": "Strip", "strip_left": True, "strip_right": True})
        components.append(_replace({"Regex": " {2,}"}, " "))
    if prefix:
        components.append({"type": "Prepend", "prepend": SPACE})
    return [*components, _replace({"String": " "}, SPACE)]


def _decoders(prefix: bool) -> list[Json]:
    components: list[Json] = [{"type": "ByteFallback"}, {"type": "Fuse"}]
    if prefix:
        components.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return [_replace({"String": SPACE}, " "), *components]


def _replace(pattern: dict[str, str], content: str) -> Json:
    return {"type": "Replace", "pattern": pattern, "content": content}


def _check_bytes(vocabulary: GgufVocabulary) -> None:
    """Raises ConfigurationError for a BYTE token with an unexpected text. The tokenizers library
    finds the tokens of byte fallback by their texts.
    """
    texts = {f"<0x{byte:02X}>" for byte in range(256)}
    for number in vocabulary.of_kinds(frozenset((TokenType.BYTE,))):
        if vocabulary.tokens[number] not in texts:
            text = quote(vocabulary.tokens[number])
            raise metadata_error(TYPES, f"{number} is a byte but reads {text}")


def _bpe(vocabulary: GgufVocabulary, merges: list[Merge]) -> Json:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": vocabulary.ids,
        "merges": merges,
    }


def _tokenizer(
    model: Json,
    added: list[Json],
    post_processor: Json | None,
    normalizer: Json | None,
    pre_tokenizer: Json | None,
    decoder: Json,
) -> Json:
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": post_processor,
        "decoder": decoder,
        "model": model,
    }


def _added(vocabulary: GgufVocabulary, replaced: bool) -> list[Json]:
    """The entries of `added_tokens`. All but USER_DEFINED tokens are special: they are left out of
    decoded text.

    - replaced: whether USER_DEFINED tokens that contain SPACE are looked for in the normalized
      text, where spaces are replaced; all others are looked for in the text as it came
    """
    return [
        {
            "id": number,
            "content": vocabulary.tokens[number],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": replaced
            and vocabulary.kinds[number] == TokenType.USER_DEFINED
            and SPACE in vocabulary.tokens[number],
            "special": vocabulary.kinds[number] != TokenType.USER_DEFINED,
        }
        for number in vocabulary.added()
    ]


def _added_ids(metadata: Metadata, vocabulary: GgufVocabulary, add_bos: bool) -> _AddedIds:
    """The special tokens around each prompt.

    - add_bos: whether there is one in front where the file does not say
    """
    return _AddedIds(
        _added_id(metadata, vocabulary, ADD_BOS, "bos_token", add_bos),
        _added_id(metadata, vocabulary, ADD_EOS, "eos_token", False),
    )


def _added_id(
    metadata: Metadata, vocabulary: GgufVocabulary, key: str, name: str, default: bool
) -> str | None:
    if not read_flag(metadata, key, default):
        return None
    if name in vocabulary.named:
        return vocabulary.tokens[vocabulary.named[name]]
    if key in metadata:
        raise ConfigurationError(f"the GGUF file's {key} is true, but {NAMED[name]} is missing")
    return None


def _template(vocabulary: GgufVocabulary, added: _AddedIds) -> Json | None:
    """The post-processor that puts `added` around a prompt; None: there is nothing to put."""
    if added.bos is None and added.eos is None:
        return None
    sequence: list[Json] = [{"Sequence": {"id": "A", "type_id": 0}}]
    single = _special(added.bos) + sequence + _special(added.eos)
    texts = {text for text in added if text is not None}
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            text: {"id": text, "ids": [vocabulary.ids[text]], "tokens": [text]} for text in texts
        },
    }


def _special(text: str | None) -> list[Json]:
    return [] if text is None else [{"SpecialToken": {"id": text, "type_id": 0}}]


MERGES = "tokenizer.ggml.merges"
SCORES = "tokenizer.ggml.scores"
# Bounds the memory that a hostile file can ask for; known vocabularies have two merges a token.
MERGES_A_TOKEN = 32

Merge = tuple[str, str]


def listed_merges(metadata: Metadata, vocabulary: GgufVocabulary) -> list[Merge]:
    """The merges in the file's list. An entry is two tokens with a space between them.

    Raises ConfigurationError if one of the two, or their concatenation, is not a token.
    """
    tokens, ids = vocabulary.tokens, vocabulary.ids
    merges: dict[Merge, None] = {}
    for number, merge in enumerate(read_texts(metadata, MERGES)):
        # The separating space is never the first character: a space there belongs to the token.
        split_at = merge.find(" ", 1)
        if split_at < 0:
            raise metadata_error(MERGES, f"entry {number} is not two tokens: {quote(merge)}")
        left_part, right = ids.get(merge[:split_at]), ids.get(merge[split_at + 1 :])
        if left_part is None or right is None or tokens[left_part] + tokens[right] not in ids:
            raise metadata_error(MERGES, f"entry {number} names an unknown token: {quote(merge)}")
        # Of equal merges the first counts. The vocabulary's own texts take no further memory.
        merges.setdefault((tokens[left_part], tokens[right]))
    return list(merges)


def scored_merges(metadata: Metadata, vocabulary: GgufVocabulary) -> list[Merge]:
    """All merges of two tokens into a token, in SentencePiece's order: by descending score of the
    result, then by ascending id; merges with the same result by descending length of the left
    part.

    Source: SentencePiece's BPE (https://aclanthology.org/D18-2012/), which joins the pair whose
        result has the highest score. Only ORDINARY tokens take part: merging cannot make a control
        or byte token. Takes time linear in the characters of the vocabulary; each is copied at most
        LONGEST times. Raises ConfigurationError.
    """
    scores = read_numbers(metadata, SCORES, len(vocabulary.tokens))
    order = vocabulary.of_kinds(ORDINARY)
    order.sort(key=scores.__getitem__, reverse=True)
    # From a text to the same text in the vocabulary, so that merges keep no copies of parts.
    known = {vocabulary.tokens[number]: vocabulary.tokens[number] for number in order}
    most = MERGES_A_TOKEN * len(vocabulary.tokens)
    merges: list[Merge] = []
    for number, token in zip(order, known, strict=True):
        vocabulary.check_length(number)
        for split_at in range(len(token) - 1, 0, -1):
            left_part = known.get(token[:split_at])
            if left_part is not None:
                right = known.get(token[split_at:])
                if right is not None:
                    merges.append((left_part, right))
        if len(merges) > most:
            raise metadata_error(TOKENS, f"more than {most} pairs of tokens make another token")
    return merges


PRE = "tokenizer.ggml.pre"

# Parts of the regular expressions below.
_ENDINGS = r"'s|'t|'re|'ve|'m|'ll|'d"
_ANY_ENDINGS = rf"(?i:{_ENDINGS})"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_LINES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
# Words in which upper-case letters come first: "camelCase" is two words.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_CAPITALS = rf"{_LEAD}{_UPPER}*{_LOWER}+%s|{_LEAD}{_UPPER}+{_LOWER}*%s"
_PATH_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"

_GPT2 = rf"{_ENDINGS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_ANY_ENDINGS}|{_WORD}|\p{{N}}{{1,3}}|{_SIGNS}|{_LINES}"
_QWEN2 = rf"{_ANY_ENDINGS}|{_WORD}|\p{{N}}|{_SIGNS}|{_LINES}"
_QWEN35 = (
    rf"{_ANY_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_LINES}"
)
_TEKKEN = rf"{_CAPITALS % ('', '')}|\p{{N}}|{_PATH_SIGNS}|{_LINES}"
_GPT4O = (
    rf"{_CAPITALS % (_ANY_ENDINGS + '?', _ANY_ENDINGS + '?')}"
    rf"|\p{{N}}{{1,3}}|{_PATH_SIGNS}|{_LINES}"
)
_SEED_CODER = rf"{_ANY_ENDINGS}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_LINES}"
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + _LINES
)
_HAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
# Letters that have upper and lower case, as DeepSeek's first tokenizers list them.
_CASED = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1"
    "\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd"
    "\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d"
    "\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4"
    "\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec"
    "\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b"
    "\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787"
    "\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2"
    "\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_FULL_WIDTH = "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"
_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"


class PreTokenizer(NamedTuple):
    """How a text is split before BPE.

    Attributes:
    - splits: regular expressions of Oniguruma. Each splits the pieces of the one before it into its
      matches and the text between them
    - whole_words: whether a piece that is a token needs no merges
    - add_bos: whether prompts begin with the bos token, if the file does not define it
    - nfc: whether text is normalized to NFC first
    """

    splits: tuple[str, ...]
    whole_words: bool = False
    add_bos: bool = False
    nfc: bool = False


_RULES: dict[tuple[str, ...], PreTokenizer] = {
    ("default",): PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    ("gpt-2", "phi-2", "gigachat", "a.x-4.0", "mellum", "exaone4", "jais"): PreTokenizer((_GPT2,)),
    ("smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b"): PreTokenizer(
        (r"\p{N}", _GPT2)
    ),
    ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"): (
        PreTokenizer((_LLAMA3,), whole_words=True, add_bos=True)
    ),
    ("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"): PreTokenizer((_LLAMA3,)),
    ("qwen2",): PreTokenizer((_QWEN2,), nfc=True),
    ("deepseek-r1-qwen", "kormo", "megrez", "stablelm2"): PreTokenizer((_QWEN2,)),
    ("qwen35",): PreTokenizer((_QWEN35,), nfc=True),
    ("tekken",): PreTokenizer((_TEKKEN,), whole_words=True, add_bos=True),
    ("gpt-4o", "llama4", "kanana2"): PreTokenizer((_GPT4O,)),
    ("deepseek-llm",): PreTokenizer(
        (r"[\r\n]", rf"\s?[{_CASED}]+", _FULL_WIDTH, r"\s+$", _HAN, r"\p{N}+")
    ),
    ("deepseek-coder",): PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN, r"\p{N}")),
    ("deepseek-v3", "hunyuan-dense"): PreTokenizer((r"\p{N}{1,3}", _KANA, _DEEPSEEK3)),
    ("falcon",): PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")),
    ("seed-coder",): PreTokenizer((_SEED_CODER,)),
    ("poro-chat", "bloom", "gpt3-finnish"): PreTokenizer((_BLOOM,)),
    ("viking",): PreTokenizer((_BLOOM, r"\p{N}")),
}
PRE_TOKENIZERS = {name: rule for names, rule in _RULES.items() for name in names}


def read_pre_tokenizer(metadata: Metadata) -> PreTokenizer:
    """The pre-tokenizer that the file names. Raises ConfigurationError if the name is missing or
    unknown: another pre-tokenizer would give ids that the model was not trained on.
    """
    name = read_text(metadata, PRE)
    if name is None:
        raise metadata_error(PRE, "missing")
    if name not in PRE_TOKENIZERS:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise metadata_error(PRE, f"{quote(name)} is not known, only: {known}")
    return PRE_TOKENIZERS[name]


TOKENS = "tokenizer.ggml.tokens"
TYPES = "tokenizer.ggml.token_type"
# Keys of the named tokens' ids, by their names in tokenizer_config.json. "seperator" is the file
# format's spelling.
NAMED = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "sep_token": "tokenizer.ggml.seperator_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
    "cls_token": "tokenizer.ggml.cls_token_id",
    "mask_token": "tokenizer.ggml.mask_token_id",
}
# Bounds on the work and memory that a hostile file can ask for. By default SentencePiece's tokens
# have at most 16 characters; vocabularies have some thousand added tokens.
LONGEST = 512  # the most characters of an added token, or of the result of a merge
MAX_ADDED = 1 << 20  # the most characters of all added tokens together


class TokenType(IntEnum):
    """The numbers in `tokenizer.ggml.token_type`."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# Added tokens: looked for in a text before it is split. Only USER_DEFINED ones are shown to users.
ADDED = frozenset((TokenType.UNKNOWN, TokenType.CONTROL, TokenType.USER_DEFINED))
# Tokens that merges can make. UNDEFINED means an ordinary token.
ORDINARY = frozenset((TokenType.UNDEFINED, TokenType.NORMAL))


class GgufVocabulary(NamedTuple):
    """The tokens of a file.

    Attributes:
    - tokens: texts by id, all different
    - kinds: a TokenType for each token
    - ids: ids by text
    - named: ids by names of tokenizer_config.json, such as "eos_token", as far as the file has them
    """

    tokens: list[str]
    kinds: list[int]
    ids: dict[str, int]
    named: dict[str, int]

    def of_kinds(self, kinds: frozenset[TokenType]) -> list[int]:
        """Ids of all tokens of these types, ascending."""
        return [number for number, kind in enumerate(self.kinds) if kind in kinds]

    def added(self) -> list[int]:
        """Ids of the added tokens, ascending. Raises ConfigurationError if one of them, or all
        together, are too long.
        """
        numbers = self.of_kinds(ADDED)
        for number in numbers:
            self.check_length(number)
        if sum(len(self.tokens[number]) for number in numbers) > MAX_ADDED:
            raise metadata_error(
                TYPES, f"control and user-defined tokens exceed {MAX_ADDED} characters"
            )
        return numbers

    def check_length(self, number: int) -> None:
        """Raises ConfigurationError if token `number` has more than LONGEST characters."""
        size = len(self.tokens[number])
        if size > LONGEST:
            raise metadata_error(TOKENS, f"{number} has {size} characters, more than {LONGEST}")


def read_vocabulary(metadata: Metadata) -> GgufVocabulary:
    """Reads the tokens. Raises ConfigurationError for keys that are missing, wrong or contradict
    each other.
    """
    tokens = read_texts(metadata, TOKENS)
    if not tokens:
        raise metadata_error(TOKENS, "empty")
    if "" in tokens:
        # No text is encoded as an empty token, but each id needs a text of its own.
        tokens = [token or f"[EMPTY_{number}]" for number, token in enumerate(tokens)]
    ids = {token: number for number, token in enumerate(tokens)}
    if len(ids) != len(tokens):
        twice = next(n for n, token in enumerate(tokens) if ids[token] != n)
        other = ids[tokens[twice]]
        raise metadata_error(TOKENS, f"{twice} and {other} are the same, {quote(tokens[twice])}")
    kinds = read_integers(metadata, TYPES, len(tokens))
    unknown = set(kinds) - set(TokenType)
    if unknown:
        raise metadata_error(TYPES, f"a token's type must be one of 0 to 6, not {min(unknown)}")
    return GgufVocabulary(tokens, kinds, ids, _named(metadata, len(tokens)))


def _named(metadata: Metadata, size: int) -> dict[str, int]:
    found = {name: read_index(metadata, key, size) for name, key in NAMED.items()}
    return {name: number for name, number in found.items() if number is not None}


class _Added(TypedDict):
    content: str
    special: bool
    normalized: bool


def load_tokenizer(metadata: Metadata) -> Tokenizer:
    """The tokenizer of the file, equal to `Tokenizer.from_str` of `tokenizer_json`. Does not write
    the vocabulary as JSON, which would take twice as long. Raises ConfigurationError.
    """
    from tokenizers import AddedToken, Tokenizer, models  # here: most readers need no tokenizer

    parts = tokenizer_json(metadata)
    model = cast(dict[str, object], parts["model"])
    added = cast(list[_Added], parts["added_tokens"])
    rest = {**parts, "model": {**model, "vocab": {}, "merges": []}, "added_tokens": []}
    given = {key: value for key, value in model.items() if value is not None and key != "type"}
    try:
        tokenizer = Tokenizer.from_str(json.dumps(rest))
        tokenizer.model = models.BPE(**given)  # pyright: ignore[reportArgumentType]
        tokenizer.add_tokens(
            [
                AddedToken(
                    token["content"], special=token["special"], normalized=token["normalized"]
                )
                for token in added
            ]
        )
    except Exception as error:  # the library raises bare Exception
        raise metadata_error(MODEL, f"cannot be built: {error}") from None
    return tokenizer
