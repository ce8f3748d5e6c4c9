"""What the names in `tokenizer.ggml.pre` stand for: how text is split before tokens are merged.

A name says which model's tokenizer it is. The rules here are those of the models' own files, and
where those are not known, those of llama.cpp. Knows no vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

from pipeinfer.gguf.values import Metadata, metadata_error, quote, read_text

PRE = "tokenizer.ggml.pre"

# Parts of the expressions below.
_ENDINGS = r"'s|'t|'re|'ve|'m|'ll|'d"
_ANY_ENDINGS = rf"(?i:{_ENDINGS})"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_LINES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
# Words in which capitals come first: "camelCase" is two.
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
    """`splits`: expressions in Oniguruma's words; each cuts the pieces that the one before it left
    into matches and what lies between them. `whole_words`: a piece that is a token needs no merges.
    `add_bos`: unless the file says otherwise. `nfc`: the model was given composed characters."""

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
    """The rule that the file names. Raises ConfigurationError for a name that is absent or not
    known: any other rule would give the model tokens that it was not trained on."""
    name = read_text(metadata, PRE)
    if name is None:
        raise metadata_error(PRE, "missing")
    if name not in PRE_TOKENIZERS:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise metadata_error(PRE, f"{quote(name)} is not known, only: {known}")
    return PRE_TOKENIZERS[name]
