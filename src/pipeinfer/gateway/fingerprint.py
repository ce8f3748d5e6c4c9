"""The fingerprint of what makes answers: the model, its tokenizer and template, the settings that
change answers, and the version of this software.

Two answers with one fingerprint, one seed and one request come from the same model. Knows the
checkpoint's files as bytes.
"""

from __future__ import annotations

import json
import os
from hashlib import blake2b
from pathlib import Path

import msgspec

from pipeinfer.checkpoint.hub import WANTED
from pipeinfer.settings import Settings
from pipeinfer.version import __version__

# Settings by which no answer changes: who may ask and how much, where processes run and what they
# write down, what waits, and what is computed when. All others count.
WITHOUT_EFFECT = frozenset(
    (
        "all_graphs_first", "allowed_hosts", "allowed_origins", "api_key", "api_key_file", "dp",
        "drain_timeout", "flight_dir", "flight_recorder_mib", "grammar_cache_mib", "host",
        "host_loss", "in_process", "itl_target", "key_concurrent", "key_requests_per_minute",
        "key_tokens_per_minute", "kv_pages", "log_format", "log_level", "max_body_mib",
        "max_prompts", "max_queue", "max_queue_tokens", "memory_fraction", "no_page",
        "otlp_endpoint", "overlap_depth", "policy", "port", "profile", "profile_dir",
        "public_address", "record", "record_max_bytes", "request_timeout", "routing", "seed",
        "served_model_name", "stay_awake", "tls_cert", "tls_key", "topology", "ttft_target",
        "vllm_metrics", "watchdog",
    )
)  # fmt: skip
# Settings that name files, which count by what is in them.
FILE_SETTINGS = frozenset(("chat_template", "model", "revision"))
MOST_WHOLE_FILE = 32 * 2**20  # bytes up to which a file is read as a whole
SAMPLES, SAMPLE = 8, 4096  # parts of a larger one, and bytes of each: weights differ everywhere


def fingerprint(settings: Settings, model: Path) -> str:
    """For the checkpoint's folder, or its GGUF file."""
    digest = blake2b(digest_size=8)
    values = msgspec.to_builtins(settings)
    counted = values.keys() - WITHOUT_EFFECT - FILE_SETTINGS
    digest.update(json.dumps([__version__, {n: values[n] for n in sorted(counted)}]).encode())
    files = [model] if model.is_file() else sorted({p for w in WANTED for p in model.glob(w)})
    for path in files:
        _add(digest, path)
    if settings.chat_template:
        _add(digest, Path(settings.chat_template))
    return f"fp_{digest.hexdigest()}"


def _add(digest: blake2b, path: Path) -> None:
    """A file's name, size and content. One that cannot be read counts by its name: whoever needs it
    says what is wrong with it."""
    digest.update(path.name.encode("utf-8", "surrogateescape"))
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            digest.update(size.to_bytes(8, "little"))
            if size <= MOST_WHOLE_FILE:
                digest.update(file.read())
                return
            for part in range(SAMPLES):
                file.seek((size - SAMPLE) * part // (SAMPLES - 1))
                digest.update(file.read(SAMPLE))
    except OSError:
        return
