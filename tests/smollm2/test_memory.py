"""What an engine takes that serves a small model on a CPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import openai
import pytest
import torch
from smollm2_prompts import NAME

from servers import Server

MIB = 2**20
# Bytes for one stream of a file of 93 MB, of which `import torch` takes 218 MiB. That differs
# between builds of torch, so it is measured here.
PROMISED, TORCH = 450_000_000, 218 * MIB
TOKENS = 24
SAY = "print(*(line for line in open('/proc/self/status')), sep='')"


def resident(status: str, name: str) -> int:
    """Bytes, of the text of /proc/PID/status."""
    line = next(line for line in status.splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


@pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this CPU multiplies no bfloat16"
)
def test_an_engine_with_one_stream_takes_what_is_promised(model: Path) -> None:
    command = [sys.executable, "-c", f"import torch; {SAY}"]
    alone = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    arguments = (str(model), "--served-model-name", NAME, "--device", "cpu", "--dtype", "bfloat16")
    with Server(*arguments) as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=240) as api:
            answer = api.chat.completions.create(
                model=NAME,
                messages=[{"role": "user", "content": "Write a story about a boat."}],
                max_tokens=TOKENS,
                extra_body={"ignore_eos": True},
            )
        assert answer.usage is not None and answer.usage.completion_tokens == TOKENS
        status = Path(f"/proc/{server.pid('engine')}/status").read_text()
    most = resident(status, "VmHWM") - resident(alone, "VmRSS")
    assert most <= PROMISED - TORCH, f"{most / MIB:.0f} MiB more than `import torch`"
