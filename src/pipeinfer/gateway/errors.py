"""Errors of requests that cannot be served, as clients see them.

- `ApiError`: status, `{"error": {...}}` as OpenAI's clients expect it, and all codes.
- Fields of request bodies that other servers, or other endpoints of this one, honour. Each is in
  one of two tables: what would change an answer is refused by name unless its value asks for
  nothing, what changes nothing is ignored. Whatever is in neither is counted and logged by name,
  also within messages and tools. From the documents of OpenAI, llama.cpp, Ollama, Text Generation
  Inference and clients, and from the request classes of vLLM and SGLang, of which a test has every
  field.

Knows neither the fields that are served nor endpoints.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

import msgspec
from aiohttp import web

from pipeinfer.params import JsonObject, JsonValue

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
MAX_LETTERS = 2000  # of a message, which may quote the client's text
WHERE = re.compile(
    r"^(?P<what>.*) - at (?P<key>`key` in )?`(?P<path>.*?)(\[\.\.\.\])?`$", re.DOTALL
)


T = TypeVar("T")

_NESTED = re.compile(
    r"\.(function|custom)(?=\.|$)"
)  # objects around a tool's fields in chats alone


class ApiError(Exception):
    """Ends one HTTP request. `param` names the offending field; `retry_after` is in seconds."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after: int = 0,
    ) -> None:
        # The message may quote a header, whose bytes need not be UTF-8.
        message = _shortened(message.encode(errors="replace").decode())
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after = retry_after

    def body(self) -> bytes:
        """The JSON of the error."""
        error = {
            "message": self.message,
            "type": TYPES.get(
                self.status, "server_error" if self.status >= 500 else "invalid_request_error"
            ),
            "param": self.param,
            "code": self.code,
        }
        return msgspec.json.encode({"error": error})


def from_validation(error: msgspec.ValidationError) -> ApiError:
    """400 for what msgspec found, with its `$.stop[0]` as the parameter `stop[0]`.

    Of an object whose keys the client chooses (`$.logit_bias[...]`) the parameter is the whole.
    """
    text = _shortened(str(error))
    found = WHERE.match(text)
    if found is None:  # the body as a whole, or a missing field, whose name msgspec quotes
        missing = re.search(r"missing required field `(\w+)`", text)
        return ApiError(400, text, missing[1] if missing else None, "invalid_type")
    path = found["path"].removeprefix("$").removeprefix(".") or None
    missing = re.search(r"missing required field `(\w+)`", found["what"])
    if missing:
        path = f"{path}.{missing[1]}" if path else missing[1]
    where = f"a key of {path}" if found["key"] else path
    message = f"{where}: {found['what']}" if where else found["what"]
    unsupported = re.match(r"(\w+) is not supported", found["what"])
    if unsupported:
        path = f"{path}.{unsupported[1]}" if path else unsupported[1]
        return ApiError(400, message, path, "unsupported_parameter")
    return ApiError(400, message, path, "invalid_type")


def required(value: T | None, where: str) -> T:
    """`value`, which a body must have at `where`. ApiError 400."""
    if value is None:
        raise ApiError(400, f"{where} must be given", where, "invalid_value")
    return value


def renamed(error: ApiError, names: Mapping[str, str]) -> ApiError:
    """`error` with the other name of the field that is wrong, from `names`: {name: other name}."""
    param = error.param or ""
    name = field_in(names, param)
    if name == param and param not in names:
        return error
    pattern = rf"(?<![\w.]){re.escape(param)}(?!\w)"
    message = re.sub(pattern, lambda _: name, error.message, count=1)
    return ApiError(error.status, message, name, error.code, error.retry_after)


def field_in(names: Mapping[str, str], param: str) -> str:
    """The other name of a field, or of one within a field of `names`; `param` if there is none."""
    longest = max((name for name in names if _is_within(param, name)), key=len, default="")
    return names[longest] + _NESTED.sub("", param[len(longest) :]) if longest else param


def _is_within(param: str, name: str) -> bool:
    return param == name or param.startswith((f"{name}.", f"{name}["))


def _shortened(text: str) -> str:
    """A long text without its middle."""
    if len(text) <= MAX_LETTERS:
        return text
    half = MAX_LETTERS // 2 - 2
    return f"{text[:half]} … {text[-half:]}"


# {code: (statuses, when)}. Other errors have no code.
CODES: dict[str, tuple[tuple[int, ...], str]] = {
    "invalid_json": ((400,), "The body is empty or no JSON."),
    "invalid_type": ((400,), "A field has the wrong type, or a required field is missing."),
    "invalid_value": (
        (400,),
        "A field's value is outside its range, or the body is nested too deeply or holds too many "
        "values.",
    ),
    "previous_response_not_found": (
        (400,),
        "The response of `previous_response_id`, or one before it, is not stored, or another key "
        "asked for it.",
    ),
    "unsupported_parameter": (
        (400,),
        "The field changes an answer in other servers and is not built here.",
    ),
    "context_length_exceeded": (
        (400,),
        "The prompt, or prompt and `max_tokens`, exceed the model's context.",
    ),
    "adapter_not_loaded": (
        (400,),
        "An adapter's files are not there, broken, or none that the model can have.",
    ),
    "bad_request": ((400,), "What came is no HTTP."),
    "invalid_body": ((400,), "The body is cut off or cannot be decompressed."),
    "invalid_api_key": ((401,), "The API key is wrong or missing."),
    "host_not_allowed": (
        (403,),
        "The server is asked by a name that is not its own: see `--allowed-hosts`.",
    ),
    "origin_not_allowed": (
        (403,),
        "A web page of another site asks a server without keys: see `--allowed-origins`.",
    ),
    "operators_only": ((403,), "Some keys are marked `admin`, and this is none of them."),
    "api_key_needed": ((403,), "Adapters are loaded only where an API key is set."),
    "model_not_found": ((404,), "Neither the model nor an adapter has that name."),
    "not_found": ((404,), "There is no such path."),
    "not_seen": (
        (404,),
        "No spans are known of the request that `/monitor/requests` was asked for.",
    ),
    "stream_not_found": (
        (404,),
        "No answer with this id is kept, or another key asked for it.",
    ),
    "response_not_found": (
        (404,),
        "No response with this id is kept, or another key asked for it.",
    ),
    "timeout": ((408,), "The request's `timeout` passed before the first output."),
    "body_timeout": ((408,), "The body does not come."),
    "stream_gone": (
        (410,),
        "The answer was kept and is not any more, or not from the wanted event on: its time is "
        "over, or `--kept-mib` or `--key-kept-mib` was reached.",
    ),
    "body_too_large": ((413,), "The body has more than `--max-body-mib`."),
    "unsupported_encoding": ((415,), "The body is compressed otherwise than by gzip or deflate."),
    "unsupported_media_type": (
        (415,),
        "The body's Content-Type is not `application/json`, at a server without keys.",
    ),
    "unknown_expectation": (
        (417,),
        "`Expect` is not `100-continue`. With `100-continue` a client gets `100 Continue` only if "
        "its key, its limits and the body's length allow the request.",
    ),
    "queue_full": (
        (429,),
        "`--max-queue` requests or `--max-queue-tokens` prompt tokens wait already.",
    ),
    "too_much_kept": (
        (429,),
        "Answers that are being computed already occupy `--kept-mib` or `--key-kept-mib`.",
    ),
    "rate_limit_exceeded": ((429,), "A limit of the key is reached. `Retry-After` says how long."),
    "request_failed": (
        (500,),
        "This request failed: its logits were not finite, or the engine crashed on it repeatedly.",
    ),
    "store_failed": ((500,), "The file of `--store` cannot be read. The log says why."),
    "stream_broken": ((500,), "A part of this request's text was lost."),
    "not_implemented": ((501,), "The model cannot do this."),
    "cannot_sleep": ((501,), "An engine cannot give its memory back; the message says why."),
    "asleep": ((503,), "The server was put to sleep with `wait=false`."),
    "too_many_pages": ((503,), "64 feeds of `/monitor/events` are open at this gateway."),
    "gateway_unanswered": (
        (503,),
        "An adapter was loaded or unloaded, and a gateway has not said within five seconds that it "
        "knows. It will.",
    ),
    "reset_unanswered": ((503,), "A group has not said that its cache is reset."),
    "host_lost": ((503,), "A stage that it needs was silent for ten times `--host-loss`."),
    "starting": ((503,), "The server is not ready yet."),
    "draining": ((503,), "The server shuts down and takes no new requests."),
    "overloaded": ((503,), "Too many large bodies are being read."),
    "too_many_connections": ((503,), "All connections are busy."),
    "shutting_down": ((503,), "The drain timeout passed before the request was done."),
}


CLIENT_CLOSED_REQUEST = 499  # the status of a request whose client has left
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def json_response(content: JsonObject, status: int = 200) -> web.Response:
    """A response with `content` as JSON."""
    return web.Response(
        body=msgspec.json.encode(content), status=status, content_type="application/json"
    )


def error_response(error: ApiError) -> web.Response:
    """The error as a response, with Retry-After where trying again makes sense."""
    headers = {"Retry-After": str(error.retry_after)} if error.retry_after else None
    return web.Response(
        body=error.body(), status=error.status, content_type="application/json", headers=headers
    )


def http_error(request: web.BaseRequest, error: web.HTTPException) -> ApiError:
    """An error of aiohttp's own, such as 404, with a message that names the path."""
    if isinstance(error, web.HTTPNotFound):
        return ApiError(404, f"there is no {request.path}", code="not_found")
    if isinstance(error, web.HTTPMethodNotAllowed):
        return ApiError(405, f"{request.path} does not take {request.method}")
    return ApiError(error.status, error.reason)


class UnroutableResponse(web.Response):
    """The response to bytes that are not HTTP: aiohttp's hooks for responses do not see it."""

    @classmethod
    def of(cls, error: ApiError) -> UnroutableResponse:
        """The error, on a connection that ends with it."""
        made = cls(body=error.body(), status=error.status, content_type="application/json")
        made.force_close()
        return made

    async def _prepare_headers(self) -> None:
        await super()._prepare_headers()
        del self.headers["Server"]


Refusals = Mapping[str, Sequence[JsonValue]]

MAX_NEUTRAL_BYTES = 64  # bytes of JSON that may be a neutral value

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
        "web_search_options": (),
        "reasoning_effort": (),  # of a completion
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
        "ec_transfer_params": (),
        "logprob_token_ids": ([],),
        "repetition_detection": (),
        "return_prompt_text": (False,),
        "return_token_offsets": (False,),
        "return_weight_versions": (False,),
        "watermarking": (False,),
        "prompt_logprob_start": (0,),
        "prompt_logprob_token_ids": ([],),
        "trace_decode_token_ids": (),
        "extra_args": ({},),
        "detokenize": (True,),
        "flat_logprobs": (False,),
        "output_kind": (),
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
        "audio_data": (),
        "background": (False,),
        "previous_response_id": ("",),
        "beam_width": (0, 1),
        "ebnf_full_assistant": (),
        "image_data": (),
        "logprob_start_len": (-1,),
        "lora_id": (),
        "max_thinking_tokens": (),
        "multi_item_delimiter_indices": (),
        "positional_embed_overrides": (),
        "require_reasoning": (False,),
        "return_bytes": (False,),
        "return_cached_tokens_details": (False,),
        "return_entropy": (False,),
        "return_flat_raw_output_top_logprobs": (False,),
        "return_flat_raw_top_logprobs": (False,),
        "return_indexer_topk": (False,),
        "return_input_ids_in_sglext": (False,),
        "return_meta_info": (False,),
        "return_output_ids_in_sglext": (False,),
        "return_prompt_token_ids": (False,),
        "return_routed_experts": (False,),
        "return_sampling_mask": (False,),
        "return_spec_tokens_details": (False,),
        "return_text_in_logprobs": (False,),
        "sampling_logprobs_mode": (),
        "sampling_params": ({},),
        "sampling_seed": (),
        "session_id": (),
        "task": (),
        "token_ids_logprob": ([],),
        "token_indices_to_pool": (),
        "top_logprobs_num": (0,),
        "video_data": (),
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
    # Fields of some bodies of this server, refused in bodies that do not have them.
    "other endpoints of this server": {
        "add_generation_prompt": (True,),
        "add_special_tokens": (),
        "allowed_token_ids": (),
        "bad_words": ([],),
        "chat_template_kwargs": ({},),
        "ebnf": (),
        "format": ("",),
        "frequency_penalty": (0, 0.0),
        "grammar": ("",),
        "guided_choice": (),
        "guided_grammar": (),
        "guided_json": (),
        "guided_regex": (),
        "ignore_eos": (False,),
        "include": ([],),
        "include_reasoning": (True,),
        "include_stop_str_in_output": (False,),
        "input": (),
        "instructions": ("",),
        "json_schema": (),
        "logit_bias": ({},),
        "logprobs": (False,),
        "max_completion_tokens": (),
        "max_new_tokens": (),
        "max_output_tokens": (),
        "max_tokens": (),
        "messages": ([],),
        "min_p": (0, 0.0),
        "min_tokens": (0,),
        "n": (1,),
        "output_config": ({},),
        "parallel_tool_calls": (True, False),
        "presence_penalty": (0, 0.0),
        "prompt": (),
        "prompt_logprobs": (False,),
        "regex": (),
        "repetition_penalty": (1, 1.0),
        "response_format": ({"type": "text"},),
        "return_token_ids": (False,),
        "skip_special_tokens": (True,),
        "stop": ([], ""),
        "stop_sequences": ([],),
        "stop_token_ids": ([],),
        "stream_options": ({}, {"include_usage": True}, {"include_usage": False}),
        "structured_outputs": (),
        "text": (),
        "thinking_token_budget": (),
        "tool_choice": ("none", "auto"),
        "tools": ([],),
        "truncate_prompt_tokens": (),
        "truncation": ("disabled",),
        "truncation_side": ("left",),
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
FIELDS_OF_OTHER_ENDPOINTS = frozenset(REFUSED_OF["other endpoints of this server"])
REFUSED = {name: neutral for those in REFUSED_OF.values() for name, neutral in those.items()}

# Fields to use in place of refused ones: the first that a body has.
ALTERNATIVES: dict[str, tuple[str, ...]] = {
    "data_1": ("text_1",),
    "data_2": ("text_2",),
    "items": ("documents",),
    "use_activation": ("normalize",),
    "min_new_tokens": ("min_tokens",),
    "no_stop_trim": ("include_stop_str_in_output",),
    "return_tokens_as_token_ids": ("return_token_ids",),
    "return_token_strs": ("return_token_ids",),
    "return_prompt_token_ids": ("return_token_ids",),
    "return_input_ids_in_sglext": ("return_token_ids",),
    "return_output_ids_in_sglext": ("return_token_ids",),
    "return_logprob": ("logprobs", "top_logprobs"),
    "separate_reasoning": ("include_reasoning",),
    "input_ids": ("prompt",),
    "sampling_seed": ("seed",),
    "n_predict": ("max_tokens", "max_output_tokens"),
    "num_predict": ("max_tokens", "max_output_tokens"),
    "max_tokens": ("max_output_tokens",),
    "max_new_tokens": ("max_tokens", "max_output_tokens"),
    "max_completion_tokens": ("max_tokens", "max_output_tokens"),
    "max_output_tokens": ("max_tokens",),
    "n_probs": ("logprobs", "top_logprobs"),
    "logprobs": ("top_logprobs",),
    "top_n_tokens": ("logprobs", "top_logprobs"),
    "top_logprobs_num": ("logprobs", "top_logprobs"),
    "repeat_penalty": ("repetition_penalty",),
    "truncate": ("truncate_prompt_tokens",),
    "think": ("enable_thinking",),
    "max_thinking_tokens": ("thinking_token_budget", "thinking"),
    "thinking_budget": ("thinking_token_budget", "thinking"),
    "thinking_token_budget": ("thinking",),
    "messages": ("input", "prompt"),
    "input": ("messages", "prompt"),
    "prompt": ("messages",),
    "instructions": ("system",),
    "stop": ("stop_sequences",),
    "stop_sequences": ("stop",),
    "response_format": ("text", "output_config"),
}

# Further fields that only bodies of /v1/responses refuse.
ONLY_RESPONSES: dict[str, tuple[JsonValue, ...]] = {
    "conversation": (),
    "context_management": ([],),
    "enable_response_messages": (False,),
    "previous_input_messages": ([],),
}
SERVED_RESPONSES = "background", "previous_response_id"
RESPONSES = {
    name: neutral
    for name, neutral in {**REFUSED, **ONLY_RESPONSES}.items()
    if name not in SERVED_RESPONSES
}

# Further fields that only bodies of /v1/messages refuse.
ONLY_MESSAGES: dict[str, tuple[JsonValue, ...]] = {
    "container": (),
    "context_management": (),
    "mcp_servers": ([],),
    "output_format": (),
    "speed": ("standard",),
}
MESSAGES = {**REFUSED, **ONLY_MESSAGES}

# Fields of vLLM and Cohere that only /v1/embeddings, /score and /v1/rerank refuse.
ONLY_POOLING: dict[str, tuple[JsonValue, ...]] = {
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "use_activation": (True,),
    "activation": (True,),
    "softmax": (),
    "max_tokens_per_doc": (),
    "data_1": (),
    "data_2": (),
    "items": (),
}
POOLING = {**REFUSED, **ONLY_POOLING}

# Fields that cannot change an answer of this server, by the reason why.
IGNORED: dict[str, tuple[str, ...]] = {
    "names of users and requests, for logs, accounts and metrics": (
        "user", "metadata", "safety_identifier", "request_id", "rid", "custom_labels",
        "conversation_id", "external_trace_header", "log_metrics", "no_logs", "extra_headers",
        "extra_query",
    ),
    "which process or provider computes an answer, and how well it is served": (
        "service_tier", "id_slot", "bootstrap_host", "bootstrap_port", "bootstrap_room",
        "bootstrap_pair_key", "decode_tp_size", "inference_geo", "data_parallel_rank",
        "routed_dp_rank", "disagg_prefill_dp_rank", "routing_key", "provider", "models", "route",
        "guided_decoding_backend",
    ),
    "what is kept, and how long; prompts are always cached, answers never": (
        "store", "keep_alive", "cache_prompt", "cache_control", "prompt_cache_key",
        "prompt_cache_retention", "prompt_cache_options", "kv_hints", "skip_reading_prefix_cache",
    ),
    "how an answer is cut into events, and what is told of its progress": (
        "stream_interval", "stream_reasoning", "timings_per_token", "return_progress",
        "output_text_buffer_length", "details",
    ),
    "how media are prepared; messages with any are refused": (
        "mm_payload", "return_mm_kwargs", "images_config", "video_config", "min_dynamic_patch",
        "max_dynamic_patch", "image_max_dynamic_patch", "video_max_dynamic_patch",
        "use_audio_in_video", "mm_hashes", "mm_content_hashes", "encoder_urls",
        "need_wait_for_mm_inputs", "num_items_assigned",
    ),
    "details of fields that are refused": (
        "dynatemp_exponent", "xtc_threshold", "dry_base", "dry_allowed_length",
        "dry_penalty_last_n", "dry_sequence_breakers", "mirostat_tau", "mirostat_eta",
        "repeat_last_n", "post_sampling_probs", "routed_experts_prompt_start",
        "routed_experts_start_len", "return_flat_raw_top_logprobs_b64",
    ),
    "what is expected of an answer, which it may be or not": ("prediction", "verbosity"),
    "bounds of tools that a server has itself; here are none": ("max_tool_calls",),
    "versions of a protocol, and strictness, which always holds": ("betas", "strict"),
}  # fmt: skip
IGNORED_FIELDS = frozenset(name for names in IGNORED.values() for name in names)
# Such fields within a body: of messages, their parts, items and tools.
IGNORED_WITHIN: dict[str, tuple[str, ...]] = {
    "names and marks of an answer that is sent back": (
        "id", "object", "status", "annotations", "citations", "logprobs", "created_at",
        "created_by", "stop_reason", "stop_sequence", "usage", "index", "provider_specific_fields",
    ),
    "reasoning that another server has encrypted, and proofs of who wrote one": (
        "data", "signature", "encrypted_content",
    ),
    "parts of what is refused by its type": (
        "image_url", "input_audio", "file", "source", "tool", "tool_name",
    ),
    "the order of keys, which is kept": ("key_order",),
}  # fmt: skip
IGNORED_NESTED_FIELDS = IGNORED_FIELDS.union(*IGNORED_WITHIN.values())


def is_neutral(raw: msgspec.Raw, neutral: Sequence[JsonValue]) -> bool:
    """Whether an unsupported field has a value that asks for nothing."""
    if memoryview(raw).nbytes > MAX_NEUTRAL_BYTES:
        return False
    try:
        value = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):  # a number that no float can hold; no UTF-8
        return False
    return value is None or any(_same(value, other) for other in neutral)


def _same(value: JsonValue, neutral: JsonValue) -> bool:
    """Equality in which False is not 0: `top_logprobs: false` does not mean 0."""
    return type(value) is type(neutral) and value == neutral
