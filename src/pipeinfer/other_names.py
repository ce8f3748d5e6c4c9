"""What vLLM and SGLang call settings of pipeinfer: as flags, and as keywords of LLM(...).

A name stands here only if it means the same; other_servers.py has the others, too.
"""

from __future__ import annotations

from collections.abc import Mapping

ALIASES = {
    # vLLM
    "tensor_parallel_size": "tp",
    "data_parallel_size": "dp",
    "gpu_memory_utilization": "memory_fraction",
    "max_num_seqs": "max_running",
    "max_num_batched_tokens": "max_step_tokens",
    "block_size": "page_size",
    "num_gpu_blocks_override": "kv_pages",
    "tool_call_parser": "tool_parser",
    "ssl_certfile": "tls_cert",
    "ssl_keyfile": "tls_key",
    # SGLang
    "model_path": "model",
    "tp_size": "tp",
    "dp_size": "dp",
    "mem_fraction_static": "memory_fraction",
    "max_running_requests": "max_running",
    "context_length": "max_model_len",
    "random_seed": "seed",
    "cuda_graph_max_bs": "cuda_graph_max_batch",
}

# Those that are on or off: the setting, and its values for on and for off.
SWITCHES: dict[str, tuple[str, object, object]] = {
    "enforce_eager": ("no_cuda_graph", True, False),
    "enable_prefix_caching": ("cache", "radix", "naive"),
    "disable_radix_cache": ("cache", "naive", "radix"),
    "disable_cuda_graph": ("no_cuda_graph", True, False),
}
# Flags that turn a switch of SWITCHES off.
TURNED_OFF = {"no_enable_prefix_caching": "enable_prefix_caching"}


class NamedTwice(ValueError):
    """A setting was given under two names; the text says which."""


def translated(given: Mapping[str, object]) -> dict[str, object]:
    """`given`, keywords by name, with the names of Settings. Raises NamedTwice."""
    found: dict[str, object] = {}
    said: dict[str, str] = {}
    for name, value in given.items():
        setting, worth = ALIASES.get(name, name), value
        if name in SWITCHES:
            setting, on, off = SWITCHES[name]
            worth = on if value else off
        if setting in found:
            raise NamedTwice(f"{said[setting]} and {name} are the same setting")
        found[setting], said[setting] = worth, name
    return found


def constants() -> dict[str, tuple[str, object]]:
    """Flags without a value: the setting and its value."""
    found = {name: (setting, on) for name, (setting, on, _) in SWITCHES.items()}
    for name, switch in TURNED_OFF.items():
        setting, _, off = SWITCHES[switch]
        found[name] = setting, off
    return found


def flag(name: str) -> str:
    """--kv-pages of kv_pages."""
    return "--" + name.replace("_", "-")
