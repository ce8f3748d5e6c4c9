"""Keywords of LLM(...) in scripts for vLLM and SGLang: which ask for nothing, what to use instead
of the others, and EngineArgs, the keywords as flags of a caller's script.

Knows names and values, no model. Names that mean a setting stand in other_servers.py, as does what
is said of the others.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar, cast

from pipeinfer import other_servers
from pipeinfer import settings as config
from pipeinfer.settings import ConfigurationError, Settings

# Values of other servers' keywords that ask for nothing else than this server does anyway, their
# defaults among them. None always does. Keywords without values here: an empty value, 0, False or
# "auto"; see is_neutral.
NEUTRAL_VALUES: dict[str, tuple[object, ...]] = {
    "all2all_backend": ("allgather_reducescatter",),
    "async_scheduling": (True,),
    "convert": ("auto", "none"),
    "cp_kv_cache_interleave_size": (1,),
    "data_parallel_backend": ("mp",),
    "dbo_decode_token_threshold": (32,),
    "dbo_prefill_token_threshold": (512,),
    "dcp_kv_cache_interleave_size": (1,),
    "decode_context_parallel_size": (1,),
    "disable_log_requests": (True, False),
    "disable_log_stats": (True, False),
    "distributed_executor_backend": ("mp", "uni"),
    "download_dir": ("",),
    "dp_sync_interval": (16,),
    "enable_auto_tool_choice": (True, False),
    "enable_cache_report": (True, False),
    "enable_chunked_prefill": (True,),
    "enable_metrics": (True, False),
    "enable_mixed_chunk": (True,),
    "enable_mm_embeds": (False,),
    "enable_priority_scheduling": (True, False),
    "ep_size": (1,),
    "expert_placement_strategy": ("linear",),
    "generation_config": ("auto",),
    "hf_token": (True,),
    "jit_monitor_mode": ("warn", "off"),
    "kv_cache_metrics_sample": (0.01,),
    "kv_offloading_backend": ("native",),
    "logprobs_mode": ("raw_logprobs",),
    "mamba_backend": ("triton",),
    "master_addr": ("127.0.0.1", "localhost"),
    "master_port": (29501,),
    "max_logprobs": (20,),
    "max_num_partial_prefills": (1,),
    "mm_device_do_normalize": (True,),
    "mm_encoder_fp8_scale_save_margin": (1.5,),
    "mm_encoder_tp_mode": ("weights",),
    "mm_hasher_algorithm": ("blake3",),
    "mm_processor_cache_gb": (4, 0),
    "mm_processor_cache_type": ("lru",),
    "mm_shm_cache_max_object_size_mb": (128,),
    "mm_tensor_ipc": ("direct_rpc",),
    "nnodes": (1,),
    "offload_num_in_group": (1,),
    "offload_prefetch_step": (1,),
    "optimization_level": (0, 1, 2),
    "per_request_spec_decode_metrics": ("none",),
    "performance_mode": ("balanced",),
    "pipeline_parallel_size": (1,),
    "pp_size": (1,),
    "prefill_context_parallel_size": (1,),
    "prefill_schedule_interval": (1,),
    "prefix_caching_hash_algo": ("sha256", "builtin"),
    "pt_load_map_location": ("cpu",),
    "renderer_num_workers": (1,),
    "replayssm_buffer_len": (16,),
    "runner": ("auto", "generate"),
    "sampling_defaults": ("model",),
    "scheduler_reserve_full_isl": (True,),
    "scheduling_policy": ("fcfs", "priority"),
    "skip_server_warmup": (True, False),
    "sleep_mode_backend": ("cumem",),
    "stream_interval": (1,),
    "structured_outputs_config": (
        {},
        {"backend": "auto"},
        {"backend": "xgrammar"},
        {"backend": "guidance"},
    ),
    "swa_bounded_replay": (True,),
    "tokenizer_mode": ("auto", "hf", "slow"),
    "use_tqdm_on_load": (True, False),
    "use_v2_block_manager": (True, False),
    "video_pruning_method": ("evs",),
}

# Keywords of vLLM's LLM that other_servers.py does not have, as few users know them.
_FURTHER = """
additional_config aggregate_engine_logging allow_deprecated_quantization allowed_media_domains
attention_config aux_output_config cpu_distributed_timeout_seconds cpu_offload_params
cudagraph_capture_sizes cudagraph_metrics custom_histogram_buckets data_parallel_external_lb
data_parallel_hybrid_lb data_parallel_multi_port_external_lb data_parallel_rank
data_parallel_rpc_port data_parallel_start_rank dcp_comm_backend dcp_q_replicate
default_mm_loras device_ids diffusion_config disable_cascade_attn disable_chunked_mm_input
disable_hybrid_kv_cache_manager disable_nccl_for_dp_synchronization disable_sliding_window
distributed_timeout_seconds ec_manager_config ec_transfer_config elastic_ep_max_dp_size
enable_batch_sharded_sampling enable_cumem_allocator enable_elastic_ep enable_ep_weight_filter
enable_fault_tolerance enable_flashinfer_autotune enable_hc_sp enable_layerwise_nvtx_tracing
enable_logging_iteration_details enable_mamba_cache_stochastic_rounding
enable_mamba_shared_prefix_checkpoint enable_mfu_metrics enable_mixed_moe_lora_format
enable_mm_processor_stats enable_moe_shared_loras enable_nccl_comm_suspend enable_prompt_embeds
enable_return_routed_experts enable_shm_tensor_arena enable_tower_connector_lora
enable_trace_replay engram_config eplb_config fail_on_environ_validation fault_tolerance_config
fully_sharded_loras gdn_prefill_backend ignore_patterns interleave_mm_strings
io_processor_plugin ir_op_priority jit_monitor_verbose kda_decode_backend kda_prefill_backend
kernel_config kv_cache_dtype_skip_layers kv_cache_metrics kv_sharing_fast_prefill
language_model_only linear_backend logging_config long_prefill_token_threshold_adaptive
lora_dtype lora_target_modules mamba_block_size mamba_cache_dtype mamba_cache_mode
mamba_cache_philox_rounds mamba_config mamba_ssm_cache_dtype mamba_ssu_algorithm max_cpu_loras
max_lora_cls_labels max_num_active_seqs max_num_queued_reqs max_num_queued_tokens
max_num_scheduled_tokens max_parallel_loading_workers media_io_kwargs mm_encoder_attn_backend
mm_encoder_attn_dtype mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path mm_encoder_only
mm_ipc_gpu_memory_gb mm_processor_device model_class_overrides model_loader_extra_config
model_weights monokernel numa_bind numa_bind_cpus numa_bind_nodes offload_backend
offload_group_size offload_params pooler_config prefix_cache_retention_interval
prefix_match_unit quantization_config ray_workers_use_nsight reasoning_config
reasoning_parser_plugin return_sampling_mask safetensors_load_strategy
safetensors_prefetch_block_size safetensors_prefetch_num_threads shutdown_timeout
show_hidden_metrics_for_version skip_mm_profiling sleep_mode_offload_cudagraph
sleep_preserve_parameter_names sparse_indexer_topk_backend spec_method spec_model spec_tokens
specialize_active_lora tokens_only ubatch_size use_fp64_gumbel use_replayssm video_pruning_rate
watchdog_config watermark watermark_config weight_transfer_config worker_cls
worker_extension_cls
"""
VLLM_KEYWORDS = frozenset(_FURTHER.split())

SPECULATE = "Use speculate (ngram, or a draft model) and num_speculative_tokens."

# Sentences about these names take precedence over those of other_servers.py about the flags.
INSTEAD = {
    "generation_config": "Without params requests have the checkpoint's defaults. Give "
    "SamplingParams() for vLLM's.",
    "hf_token": "Set HF_TOKEN in the environment.",
    "enable_chunked_prefill": "Prompts are always cut: a step beside others would have no bound.",
    "async_scheduling": "Use overlap_depth=1.",
    "spec_method": SPECULATE,
    "spec_model": SPECULATE,
    "spec_tokens": SPECULATE,
}
NOT_AVAILABLE = "There is nothing like it here."

# Values of settings that others call otherwise.
VALUE_ALIASES: dict[str, dict[object, object]] = {
    "dtype": {"half": "float16", "float": "float32"},
    "load_format": {"safetensors": "auto", "hf": "auto"},
    "model_impl": {"vllm": "pipeinfer", "sglang": "pipeinfer"},
    "grammar_backend": {"xgrammar": "llguidance", "outlines": "llguidance"},
}


def settings_of(given: Mapping[str, object]) -> dict[str, object]:
    """Names and values of Settings, from keywords under any server's names.

    None is what is not given. Left out is what asks for nothing. Raises ConfigurationError, which
    names all keywords that ask for something else, with what to use instead.
    """
    accepted: dict[str, object] = {}
    wrong: list[str] = []
    foreign = other_servers.refused_flags()
    for name, value in given.items():
        if is_setting(name):
            if value is not None:
                accepted[name] = _worth(name, value)
                wrong += _unfit(name, accepted[name])
        elif (
            name not in VLLM_KEYWORDS
            and name not in NEUTRAL_VALUES
            and other_servers.flag(name) not in foreign
        ):
            wrong.append(config.unknown(name))
        elif not (is_neutral(value, NEUTRAL_VALUES.get(name)) or _repeats(name, value, given)):
            wrong.append(f"{name}={value!r:.60}: {instead_of(name)}")
    if wrong:
        raise ConfigurationError("\n".join(wrong))
    try:
        return other_servers.translated(accepted)
    except other_servers.NamedTwice as error:
        raise ConfigurationError(str(error)) from None


def is_setting(name: str) -> bool:
    """Whether a keyword means a setting, under whichever name."""
    ours = Settings.__struct_fields__
    return name in ours or name in other_servers.ALIASES or name in other_servers.SWITCHES


def is_neutral(value: object, allowed: Iterable[object] | None = None) -> bool:
    """Whether leaving a keyword out would be the same. `allowed`: all values that do so, beside
    None; without it those that are empty, 0, False, "auto", or hold only such."""
    if value is None:
        return True
    if allowed is not None:
        return any(type(value) is type(one) and value == one for one in allowed)
    if isinstance(value, Mapping):
        return all(is_neutral(one) for one in value.values())
    if isinstance(value, (str, Sequence, set, frozenset)):
        return len(value) == 0 or value == "auto"
    return isinstance(value, (bool, int, float)) and not value


def instead_of(name: str) -> str:
    """A sentence that names the replacement of another server's keyword."""
    if name in INSTEAD:
        return INSTEAD[name]
    flag = other_servers.refused_flags().get(other_servers.flag(name))
    if flag is None:
        return NOT_AVAILABLE
    use = f"Use {' and '.join(flag.ours)}. " if flag.ours else ""
    text = f"{use}{flag.advice}".replace("`", "")
    return re.sub(r"--([a-z][a-z-]+)", lambda found: found[1].replace("-", "_"), text)


def _worth(name: str, value: object) -> object:
    """A value as Settings take it."""
    if isinstance(value, os.PathLike):
        return os.fspath(cast("os.PathLike[str]", value))
    if name == "dtype":
        value = str(value).removeprefix("torch.")
    if name == "log_level" and isinstance(value, str):
        return value.lower()
    if name == "served_model_name" and isinstance(value, (list, tuple)) and len(value) == 1:
        return value[0]
    if isinstance(value, str):
        return VALUE_ALIASES.get(name, {}).get(value, value)
    return value


def _unfit(name: str, value: object) -> list[str]:
    """The errors of a setting's value; [] if it is valid."""
    try:
        config.build(other_servers.translated({name: value}))
    except ConfigurationError as error:
        return [str(error)]
    return []


def _repeats(name: str, value: object, given: Mapping[str, object]) -> bool:
    """Whether it gives the tokenizer the value that the model has."""
    of_model = {"tokenizer": "model", "tokenizer_path": "model_path"}
    if name == "tokenizer_revision" or name == "code_revision":
        return value == given.get("revision")
    return name in of_model and value in (given.get("model"), given.get(of_model[name]))


Parser = TypeVar("Parser", bound=argparse.ArgumentParser)


class EngineArgs:
    """Keywords of LLM(...), as attributes: LLM(**vars(args)), or LLM.from_engine_args(args)."""

    def __init__(self, model: str = "", **settings: object) -> None:
        self.model = model
        vars(self).update(settings)

    @staticmethod
    def add_cli_args(parser: Parser) -> Parser:
        """Adds --model and a flag for every setting, under all names that `pipeinfer serve` knows.
        What is not given stays out of the namespace."""
        parser.add_argument("--model", default="", help="a folder or a hub id; nothing: the demo")
        config.add_flags(parser)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> EngineArgs:
        """Engine arguments of the flags; other attributes of the namespace are left out."""
        return cls(**{name: value for name, value in vars(args).items() if is_setting(name)})


class FlexibleArgumentParser(argparse.ArgumentParser):
    """A parser that takes flags also with underscores: --max_model_len is --max-model-len."""

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parses the flags that are known, as argparse does, with underscores as dashes."""
        given = sys.argv[1:] if args is None else list(args)
        return super().parse_known_args(
            [_dashed(one) for one in given], namespace or argparse.Namespace()
        )


def _dashed(argument: str) -> str:
    """A flag's name with dashes; its value as it is."""
    found = re.match(r"--[a-z][a-z0-9_-]*", argument)
    return argument if found is None else found[0].replace("_", "-") + argument[found.end() :]
