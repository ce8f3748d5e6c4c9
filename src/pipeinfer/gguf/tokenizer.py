"""A GGUF file's tokenizer, in the words of tokenizer.json and tokenizer_config.json.

Knows metadata that was read already, and no file. Byte-level BPE ("gpt2") and SentencePiece's BPE
("llama") are known.
"""

from __future__ import annotations

from typing import NamedTuple

from pipeinfer.gguf.merges import Merge, listed_merges, scored_merges
from pipeinfer.gguf.pre_tokenizers import PreTokenizer, read_pre_tokenizer
from pipeinfer.gguf.values import Metadata, metadata_error, quote, read_flag, read_text
from pipeinfer.gguf.vocabulary import NAMED, TYPES, Kind, Vocabulary, read_vocabulary
from pipeinfer.settings import ConfigurationError

MODEL = "tokenizer.ggml.model"
BYTE_LEVEL, SENTENCE_PIECE = "gpt2", "llama"
ADD_BOS, ADD_EOS = "tokenizer.ggml.add_bos_token", "tokenizer.ggml.add_eos_token"
PREFIX, TRIM = "tokenizer.ggml.add_space_prefix", "tokenizer.ggml.remove_extra_whitespaces"
TEMPLATE = "tokenizer.chat_template"
SPACE = "\u2581"  # what SentencePiece writes for a space
# Ids of SentencePiece files that do not say them.
SENTENCE_PIECE_IDS = {"unk_token": 0, "bos_token": 1, "eos_token": 2}

Json = dict[str, object]


class _Ends(NamedTuple):
    """What stands around each prompt: tokens or None."""

    bos: str | None
    eos: str | None


def tokenizer_json(metadata: Metadata) -> Json:
    """What tokenizer.json would hold; `Tokenizer.from_str` reads it as JSON.

    `metadata`: the file's keys and values as plain Python. Gives the ids of the model's own
    tokenizer; lists share the metadata's texts. Raises ConfigurationError for a kind of tokenizer
    that is not known, and for metadata that is incomplete or contradicts itself.
    """
    model = _model(metadata)
    vocabulary = _vocabulary(metadata, model)
    if model == BYTE_LEVEL:
        return _byte_level(metadata, vocabulary)
    return _sentence_piece(metadata, vocabulary)


def tokenizer_config(metadata: Metadata) -> Json:
    """What tokenizer_config.json would hold: the named tokens' texts, and chat templates.

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


def _vocabulary(metadata: Metadata, model: str) -> Vocabulary:
    vocabulary = read_vocabulary(metadata)
    if model == BYTE_LEVEL:
        return vocabulary
    size = len(vocabulary.tokens)
    usual = {name: number for name, number in SENTENCE_PIECE_IDS.items() if number < size}
    vocabulary = vocabulary._replace(named={**usual, **vocabulary.named})
    return vocabulary if read_flag(metadata, PREFIX, True) else _spelled(vocabulary)


def _spelled(vocabulary: Vocabulary) -> Vocabulary:
    """Spaces in users' tokens, as in Gemma's tokens for indentation, written as in all others.

    The file has them as spaces; SentencePiece looks for them after it replaced the text's.
    """
    tokens = list(vocabulary.tokens)
    for number in vocabulary.of_kinds(frozenset((Kind.USER_DEFINED,))):
        spelled = tokens[number].replace(" ", SPACE)
        if spelled not in vocabulary.ids:
            tokens[number] = spelled
    ids = {token: number for number, token in enumerate(tokens)}
    return vocabulary._replace(tokens=tokens, ids=ids) if len(ids) == len(tokens) else vocabulary


def _templates(metadata: Metadata) -> dict[str, str]:
    """Jinja text by name. The name of a template is the rest of its key."""
    templates = {}
    default = read_text(metadata, TEMPLATE)
    if default is not None:
        templates["default"] = default
    for key in sorted(key for key in metadata if key.startswith(TEMPLATE + ".")):
        text = read_text(metadata, key)
        if text is not None:
            templates.setdefault(key.removeprefix(TEMPLATE + "."), text)
    return templates


def _byte_level(metadata: Metadata, vocabulary: Vocabulary) -> Json:
    rule = read_pre_tokenizer(metadata)
    ends = _ends(metadata, vocabulary, rule.add_bos)
    model = _bpe(vocabulary, listed_merges(metadata, vocabulary))
    model["ignore_merges"] = rule.whole_words
    return _tokenizer(
        model,
        _added(vocabulary, replaced=False),
        _template(vocabulary, ends),
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


def _sentence_piece(metadata: Metadata, vocabulary: Vocabulary) -> Json:
    prefix = read_flag(metadata, PREFIX, True)
    trim = read_flag(metadata, TRIM, False)
    ends = _ends(metadata, vocabulary, add_bos=True)
    _check_bytes(vocabulary)
    model = _bpe(vocabulary, scored_merges(metadata, vocabulary))
    model |= {"byte_fallback": True, "fuse_unk": True}
    if "unk_token" in vocabulary.named:
        model["unk_token"] = vocabulary.tokens[vocabulary.named["unk_token"]]
    return _tokenizer(
        model,
        # The prefix would be looked for in front of the token, not of the text.
        _added(vocabulary, replaced=not prefix),
        _template(vocabulary, ends),
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


def _check_bytes(vocabulary: Vocabulary) -> None:
    """What no token spells becomes bytes, which are found by their texts."""
    texts = {f"<0x{byte:02X}>" for byte in range(256)}
    for number in vocabulary.of_kinds(frozenset((Kind.BYTE,))):
        if vocabulary.tokens[number] not in texts:
            text = quote(vocabulary.tokens[number])
            raise metadata_error(TYPES, f"{number} is a byte but reads {text}")


def _bpe(vocabulary: Vocabulary, merges: list[Merge]) -> Json:
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


def _added(vocabulary: Vocabulary, replaced: bool) -> list[Json]:
    """Tokens that are looked for in the text as it came, and those of users that spell a space
    after spaces were `replaced`. Only those of users are shown to users."""
    return [
        {
            "id": number,
            "content": vocabulary.tokens[number],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": replaced
            and vocabulary.kinds[number] == Kind.USER_DEFINED
            and SPACE in vocabulary.tokens[number],
            "special": vocabulary.kinds[number] != Kind.USER_DEFINED,
        }
        for number in vocabulary.added()
    ]


def _ends(metadata: Metadata, vocabulary: Vocabulary, add_bos: bool) -> _Ends:
    """`add_bos`: what the kind of tokenizer does where the file does not say."""
    return _Ends(
        _end(metadata, vocabulary, ADD_BOS, "bos_token", add_bos),
        _end(metadata, vocabulary, ADD_EOS, "eos_token", False),
    )


def _end(
    metadata: Metadata, vocabulary: Vocabulary, key: str, name: str, default: bool
) -> str | None:
    if not read_flag(metadata, key, default):
        return None
    if name in vocabulary.named:
        return vocabulary.tokens[vocabulary.named[name]]
    if key in metadata:
        raise ConfigurationError(f"the GGUF file's {key} is true, but {NAMED[name]} is missing")
    return None


def _template(vocabulary: Vocabulary, ends: _Ends) -> Json | None:
    """Puts `ends` around a prompt."""
    if ends.bos is None and ends.eos is None:
        return None
    sequence: list[Json] = [{"Sequence": {"id": "A", "type_id": 0}}]
    single = _special(ends.bos) + sequence + _special(ends.eos)
    texts = {text for text in ends if text is not None}
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
