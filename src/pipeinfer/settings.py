"""Every setting of pipeinfer: one struct behind flags, environment variables and LLM(...) keywords.

Knows no stage; it says what the values are, not what they do. Precedence: flag, then environment
(`--kv-pages` = PIPEINFER_KV_PAGES), then the topology file's [settings] table, then the default.
"""

from __future__ import annotations

import argparse
import re
import types
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from pipeinfer import other_names, other_servers
from pipeinfer.close_names import did_you_mean, no_number, none_of
from pipeinfer.command_line import CommandLine
from pipeinfer.settings_help import GROUPS

PREFIX = "PIPEINFER_"
DEMO = "pipeinfer-demo"

Positive = Annotated[int, Meta(ge=1)]
NonNegative = Annotated[int, Meta(ge=0)]


class ConfigurationError(ValueError):
    """A wrong setting, topology or checkpoint; the text is for the user, the exit code is 2."""


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings with their defaults. settings_help.py says what each does."""

    model: str = ""
    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 8000
    public_address: str = ""  # gateway/http_server.py
    served_model_name: str = ""
    api_key: str = ""
    api_key_file: str = ""
    key_concurrent: NonNegative = 0  # of each key: requests at a time; 0: without limit
    key_requests_per_minute: NonNegative = 0
    key_tokens_per_minute: NonNegative = 0
    tls_cert: str = ""
    tls_key: str = ""
    allowed_origins: str = ""
    allowed_hosts: str = ""
    no_page: bool = False
    chat_template: str = ""
    control_tokens_in_messages: bool = False
    trust_request_chat_template: bool = False
    tool_parser: str = "auto"  # gateway/tool_parsers/registry.py
    reasoning_parser: str = "auto"
    grammar_backend: Literal["llguidance", "none"] = "llguidance"
    grammar_cache_mib: Positive = 512  # of each engine
    allow_additional_properties: bool = False  # of objects whose schema says nothing of them
    revision: str = ""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    load_format: Literal["auto", "dummy"] = "auto"
    quantization: Literal[  # checkpoint/quantization.py
        "auto", "none", "fp8", "int8", "awq", "compressed-tensors", "gptq", "mxfp4"
    ] = "auto"
    model_impl: Literal["auto", "pipeinfer", "transformers"] = "auto"
    tp: Positive = 1
    dp: Positive = 1
    routing: Literal["prefix", "least-loaded", "round-robin"] = "prefix"
    max_model_len: NonNegative = 0  # 0: what the checkpoint says
    max_running: Positive = 256
    max_step_tokens: NonNegative = 0  # 0: 2,048 on the CPU, 8,192 on a GPU
    mixed_step_tokens: NonNegative = 0  # 0: as measured, or a sixteenth of the budget
    itl_target: Annotated[float, Meta(ge=0, le=60)] = 0.025  # seconds of a step; 0: no bound
    ttft_target: Annotated[float, Meta(ge=0, le=3600)] = 0.5  # seconds; 0: none
    policy: str = "mixed"
    overlap_depth: Annotated[int, Meta(ge=1, le=2)] = 2
    cache: str = "radix"
    page_size: NonNegative = 0  # 0: what the attention backend prefers
    kv_pages: NonNegative = 0  # 0: from free memory
    kv_cache_dtype: Literal["auto", "bfloat16", "fp8", "fp8_e4m3"] = "auto"  # fp8: fp8_e4m3
    memory_fraction: Annotated[float, Meta(gt=0, le=1)] = 0.9
    attention: str = "auto"
    moe_backend: Literal["auto", "triton", "torch"] = "auto"
    all_reduce: Literal["auto", "nccl"] = "auto"
    enable_expert_parallel: bool = False
    cuda_graph_max_batch: NonNegative = 256
    no_cuda_graph: bool = False
    all_graphs_first: bool = False
    compile: bool = False
    seed: NonNegative = 0
    profile: NonNegative = 0  # steps of a torch profiler's trace
    profile_dir: str = "."
    record: str = ""
    record_max_bytes: NonNegative = 0  # 0: without limit
    flight_recorder_mib: NonNegative = 32  # 0: off
    flight_dir: str = ""
    topology: str = ""
    in_process: bool = False
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = "text"
    otlp_endpoint: str = ""
    vllm_metrics: bool = False
    threads: NonNegative = 0  # torch threads on the CPU; 0: all cores
    stay_awake: Literal["auto", "always", "never"] = "auto"  # runtime/busy_poll.py
    drain_timeout: Annotated[float, Meta(ge=0)] = 30.0
    watchdog: Annotated[float, Meta(gt=0)] = 120.0  # seconds without a result that end an epoch
    host_loss: Annotated[float, Meta(ge=1, le=3600)] = 20.0  # seconds of silence
    max_queue: Positive = 10_000  # requests that may wait before new ones get 429
    max_body_mib: Positive = 32
    max_prompts: Positive = 1024  # of one request
    max_queue_tokens: NonNegative = 10_000_000  # of prompts that may wait; 0: without limit
    request_timeout: Annotated[float, Meta(ge=0, le=86_400)] = 3600.0  # seconds; 0: none

    @property
    def model_name(self) -> str:
        """What /v1/models calls it."""
        return self.served_model_name or self.model or DEMO


def build(values: Mapping[str, object]) -> Settings:
    """Settings from loosely typed values (strings from flags or the environment are converted).

    Raises ConfigurationError, which names the setting.
    """
    known = set(Settings.__struct_fields__)
    for name in values:
        if name not in known:
            why = other_servers.refused().get(other_names.flag(name))
            raise ConfigurationError(why or unknown(name))
    try:
        return msgspec.convert(dict(values), Settings, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigurationError(_named(str(error), values)) from None


def unknown(name: str) -> str:
    """What is said of a name that is no setting, with the one that it resembles most."""
    names = [*Settings.__struct_fields__, *other_names.ALIASES, *other_names.SWITCHES]
    return f"unknown setting {name!r}{did_you_mean(name, names)}"


def _named(text: str, values: Mapping[str, object]) -> str:
    """Turns msgspec's "... - at `$.kv_pages`" into "--kv-pages: ..."; of a value that is no choice
    it says the choices, of one that is no number just that."""
    text, found, field = text.partition(" - at `$.")
    if not found:
        return text
    name = field.rstrip("`")
    choices = flag_types()[name][1]
    kind = re.fullmatch(r"Expected `(int|float)(?: \| null)?`, got `\w+`", text)
    reason = none_of(values[name], choices) if choices else text
    reason = no_number(values[name], kind[1]) if kind else reason
    return f"{other_names.flag(name)}: {reason}"


def from_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The settings named in `environ`, as text; empty values count as not given."""
    names = {PREFIX + field.upper(): field for field in Settings.__struct_fields__}
    return {names[key]: value for key, value in environ.items() if key in names and value != ""}


def to_environment(settings: Settings) -> dict[str, str]:
    """What to put into a child's environment so that it has the same settings."""
    defaults = Settings()
    changed = {}
    for field in Settings.__struct_fields__:
        value = getattr(settings, field)
        if value != getattr(defaults, field):
            changed[PREFIX + field.upper()] = str(int(value) if isinstance(value, bool) else value)
    return changed


def flag_types() -> dict[str, tuple[type, tuple[str, ...]]]:
    """(python type, choices) of each setting, for the command line's parser."""
    table = {}
    for name, hint in get_type_hints(Settings, include_extras=False).items():
        if get_origin(hint) is Literal:
            table[name] = (str, get_args(hint))
        elif get_origin(hint) in (Union, types.UnionType):
            table[name] = (str, ())
        else:
            table[name] = (hint, ())
    return table


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds a flag for every setting but `model`; what is not given stays out of the namespace."""
    kinds, defaults = flag_types(), Settings()
    for title, group in GROUPS.items():
        added = parser.add_argument_group(title)
        for name, told in group.items():
            kind, choices = kinds[name]
            value, text = told.value, told.line
            flag = other_names.flag(name)
            if kind is bool:
                added.add_argument(flag, action="store_true", default=argparse.SUPPRESS, help=text)
                continue
            default = getattr(defaults, name)
            shown = f" (default: {default})" if default not in ("", 0) else ""
            metavar = "|".join(choices) or value
            added.add_argument(flag, metavar=metavar, default=argparse.SUPPRESS, help=text + shown)
    _add_other_names(parser)


def _add_other_names(parser: argparse.ArgumentParser) -> None:
    """Those of other servers, which no help shows; docs/reference/other-servers.md has them."""
    nothing = argparse.SUPPRESS
    for name in other_servers.refused():
        # The value is optional: whether they take one does not matter.
        parser.add_argument(name, action=_Refused, nargs="?", dest=nothing, help=nothing)
    for name, setting in other_names.ALIASES.items():
        if setting != "model":
            flag = other_names.flag(name)
            parser.add_argument(flag, dest=setting, default=nothing, help=nothing)
    for name, (setting, value) in other_names.constants().items():
        parser.add_argument(
            other_names.flag(name), dest=setting, action="store_const", const=value,
            default=nothing, help=nothing,
        )  # fmt: skip


class _Refused(argparse.Action):
    """A flag that only another server has: the error says what to do instead."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        parser.error(other_servers.refused()[str(option_string)])


def parse_flags(arguments: Sequence[str]) -> dict[str, object]:
    """Settings given as flags; argparse ends the process with code 2 for an unknown one."""
    parser = CommandLine()
    parser.add_argument("model", nargs="?", default=argparse.SUPPRESS)
    add_flags(parser)
    return vars(parser.parse_args(arguments))
