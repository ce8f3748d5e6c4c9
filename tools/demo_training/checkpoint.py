"""The demo model's checkpoint: its shape, its byte tokenizer, its chat template, its files.

Knows nothing about what the model is trained on.
"""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import Qwen3Config, Qwen3ForCausalLM

PAD, START, END = 256, 257, 258
# Eight, so that the vocabulary of 264 divides over up to eight ranks.
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|reserved_{i}|>" for i in range(5)))
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' }}
{%- endif -%}
"""


def byte_alphabet() -> list[str]:
    """Return the printable stand-in of every byte, as the ByteLevel pre-tokenizer writes it.

    The mapping is GPT-2's `bytes_to_unicode`.
    """
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in kept]
    letters = {byte: chr(byte) for byte in kept}
    letters |= {byte: chr(256 + index) for index, byte in enumerate(moved)}
    return [letters[byte] for byte in range(256)]


def build_tokenizer() -> Tokenizer:
    """Return a tokenizer without merges: a token's id is its byte, so no text is ambiguous."""
    vocabulary = {letter: byte for byte, letter in enumerate(byte_alphabet())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIALS])
    return tokenizer


def build_model() -> Qwen3ForCausalLM:
    """Return a fresh model of 0.8 million parameters, just over 3 MB in float32."""
    config = Qwen3Config(
        vocab_size=256 + len(SPECIALS),
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=384,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=END,
        pad_token_id=PAD,
        dtype="float32",
    )
    return Qwen3ForCausalLM(config)


def save(model: Qwen3ForCausalLM, folder: Path) -> None:
    """Write `model` into `folder`, with everything that a server or transformers needs."""
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    build_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIALS[END - 256],
        "pad_token": SPECIALS[PAD - 256],
        "clean_up_tokenization_spaces": False,
        "model_max_length": model.config.max_position_embeddings,
    }
    # Temperature 0 is for servers that take their defaults from here; transformers ignores it.
    generation_config = {
        "do_sample": False,
        "temperature": 0.0,
        "eos_token_id": [END, PAD],
        "pad_token_id": PAD,
    }
    _write_json(folder / "tokenizer_config.json", tokenizer_config)
    _write_json(folder / "generation_config.json", generation_config)


def _write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
