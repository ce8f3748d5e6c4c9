"""Fields of request bodies that other servers know and this one does not honour.

Each is in one of two tables: what would change an answer is refused by name unless its value asks
for nothing, what changes nothing is ignored. Whatever is in neither is counted and logged by name.
From the documents of OpenAI, vLLM, SGLang, llama.cpp, Ollama, Text Generation Inference, and of
clients that speak to several of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from pipeinfer.json_values import JsonValue

Refusals = Mapping[str, Sequence[JsonValue]]

LONGEST_NEUTRAL = 64  # bytes of JSON that may be a neutral value

# By who knows them, then by name, the values that ask for nothing; null always does.
REFUSED_OF: dict[str, dict[str, tuple[JsonValue, ...]]] = {
    "OpenAI": {
        "best_of": (1,),  # of a chat
        "top_logprobs": (0,),  # of a completion
        "suffix": ("",),
        "echo": (False,),  # of a chat
        "functions": ([],),  # of all but chats
        "function_call": ("none", "auto"),  # of all but chats
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "web_search_options": (),
        "reasoning_effort": (),  # of a completion
        "verbosity": (),
    },
    "vLLM": {
        "length_penalty": (1, 1.0),
        "use_beam_search": (False,),
        "early_stopping": (False,),
        "guided_whitespace_pattern": (),
        "structural_tag": (),
        "logits_processors": ([],),
        "spaces_between_special_tokens": (True,),
        "chat_template": (),  # of a completion
        "continue_final_message": (False,),  # of a completion
        "documents": ([],),  # of a completion
        "mm_processor_kwargs": ({},),
        "media_io_kwargs": ({},),
        "prompt_embeds": (),
        "return_token_strs": (False,),
        "return_tokens_as_token_ids": (False,),
        "kv_transfer_params": (),
        "vllm_xargs": ({},),
    },
    "SGLang": {
        "stop_regex": ([],),
        "no_stop_trim": (False,),
        "min_new_tokens": (0,),
        "lora_path": (),
        "session_params": (),
        "custom_logit_processor": (),
        "custom_params": (),
        "return_hidden_states": (False,),
        "return_logprob": (False,),
        "separate_reasoning": (True,),
        "input_ids": (),
        "input_embeds": (),
    },
    "llama.cpp": {
        "n_predict": (),
        "n_probs": (0,),
        "n_indent": (0,),
        "min_keep": (0,),
        "repeat_penalty": (1, 1.0),
        "typical_p": (1, 1.0),
        "dynatemp_range": (0, 0.0),
        "top_n_sigma": (-1, -1.0),
        "xtc_probability": (0, 0.0),
        "dry_multiplier": (0, 0.0),
        "mirostat": (0,),
        "samplers": (),
        "lora": ([],),
        "t_max_predict_ms": (0,),
        "reasoning_format": (),
        "input_prefix": ("",),
        "input_suffix": ("",),
    },
    "Ollama": {
        "options": ({},),
        "system": ("",),
        "template": ("",),
        "raw": (False,),
        "context": ([],),
        "images": ([],),
        "think": (),
        "num_predict": (),
        "num_ctx": (),
        "tfs_z": (1, 1.0),
    },
    "Text Generation Inference": {
        "inputs": (),
        "parameters": ({},),
        "do_sample": (),
        "return_full_text": (False,),
        "top_n_tokens": (0,),
        "truncate": (),
        "watermark": (False,),
        "decoder_input_details": (False,),
        "adapter_id": (),
        "tool_prompt": (),
        "guideline": (),
    },
    "others": {
        "top_a": (0, 0.0),
        "tfs": (1, 1.0),
        "eta_cutoff": (0, 0.0),
        "epsilon_cutoff": (0, 0.0),
        "smoothing_factor": (0, 0.0),
        "guidance_scale": (1, 1.0),
        "negative_prompt": ("",),
        "no_repeat_ngram_size": (0,),
        "num_beams": (1,),
        "penalty_alpha": (0, 0.0),
        "ban_eos_token": (False,),
        "custom_token_bans": ("",),
        "enable_thinking": (),  # of a completion
        "thinking": (),
        "thinking_budget": (),
        "reasoning": (),
        "enable_search": (False,),
        "plugins": ([],),
        "transforms": ([],),
    },
}
REFUSED = {name: neutral for those in REFUSED_OF.values() for name, neutral in those.items()}

# What to ask for in the place of some of them.
INSTEAD = {
    "min_new_tokens": "min_tokens",
    "no_stop_trim": "include_stop_str_in_output",
    "return_tokens_as_token_ids": "return_token_ids",
    "return_token_strs": "return_token_ids",
    "return_logprob": "logprobs",
    "separate_reasoning": "include_reasoning",
    "input_ids": "prompt",
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "n_probs": "logprobs",
    "top_n_tokens": "logprobs",
    "repeat_penalty": "repetition_penalty",
    "truncate": "truncate_prompt_tokens",
    "think": "enable_thinking",
    "thinking_budget": "thinking_token_budget",
}

# Of the bodies of /v1/responses, beside those.
RESPONSES_ALONE: dict[str, tuple[JsonValue, ...]] = {
    "background": (False,),
    "conversation": (),
    "previous_response_id": ("",),
    "prompt": (),
    "truncation": ("disabled",),
    "context_management": ([],),
}
RESPONSES = {**REFUSED, **RESPONSES_ALONE}

# Of the bodies of /v1/messages, beside those.
MESSAGES_ALONE: dict[str, tuple[JsonValue, ...]] = {
    "container": (),
    "context_management": (),
    "mcp_servers": ([],),
    "output_format": (),
    "speed": ("standard",),
}
MESSAGES = {**REFUSED, **MESSAGES_ALONE}

# Without meaning here, or about what other fields already say.
HARMLESS = frozenset(
    (
        "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
        "prompt_cache_retention", "request_id", "id_slot", "cache_prompt",
        "keep_alive", "rid", "bootstrap_host", "bootstrap_port", "bootstrap_room",
        "cache_control", "inference_geo", "betas", "data_parallel_rank",
        "timings_per_token", "return_progress", "stream_reasoning",
        "dynatemp_exponent", "xtc_threshold", "dry_base", "dry_allowed_length",
        "dry_penalty_last_n", "dry_sequence_breakers", "mirostat_tau", "mirostat_eta",
        "repeat_last_n", "post_sampling_probs", "guided_decoding_backend", "provider", "models",
        "route", "details", "strict", "extra_headers", "extra_query",
    )
)  # fmt: skip


def asks_for_nothing(raw: msgspec.Raw, neutral: Sequence[JsonValue]) -> bool:
    """Whether a field that is refused has one of the values that are `neutral` there."""
    if memoryview(raw).nbytes > LONGEST_NEUTRAL:
        return False
    try:
        value = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):  # a number that no float can hold; no UTF-8
        return False
    return value is None or any(_same(value, other) for other in neutral)


def _same(value: JsonValue, neutral: JsonValue) -> bool:
    """Equality that tells False from 0: `top_logprobs: false` is no way of saying 0."""
    return type(value) is type(neutral) and value == neutral
