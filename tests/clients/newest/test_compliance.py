"""llm-comply: whether answers have the forms that descriptions of the APIs demand.

Left out: its cases with images; with tools, whose schemas bound nothing, so that the demo model
goes on for ever; without `model`, which is optional here; and those that demand every field of a
response or a message that OpenAI's and Anthropic's own servers have, such as `service_tier`.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from bounded import KEY, MODEL

CASES = {
    "openai-chat": (
        "chat-basic-response",
        "chat-system-prompt",
        "chat-multi-turn",
        "chat-streaming-response",
        "chat-streaming-usage",
    ),
    "anthropic": ("anth-streaming-response", "anth-streaming-usage", "anth-error-handling"),
}


@pytest.mark.parametrize("form", CASES)
def test_the_forms_of_an_api_are_kept(url, form):
    command = [str(Path(sys.executable).with_name("llm-comply")), "--format", form, "--json"]
    done = subprocess.run(
        [*command, "-u", url, "-k", KEY, "-m", MODEL, "-f", ",".join(CASES[form])],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    found = {case["id"]: case["status"] for case in json.loads(done.stdout)["results"]}
    assert found == dict.fromkeys(CASES[form], "passed"), done.stdout
