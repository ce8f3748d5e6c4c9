"""Chat templates of well-known families of models, for any test that needs them.

`PUBLISHED`: texts as their makers give them, of models whose licence lets them be passed on, in
tokenizer/published. `SHAPES`: small templates of our own, in tokenizer/shapes, that do what those
of a family do whose licence does not, or of which no text was at hand. Import it as
`import template_families`.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent / "tokenizer"
MIT, APACHE = "MIT", "Apache-2.0"


class Family(NamedTuple):
    """`licence`: of the model, and with it of the text. `origin`: the model. `by`: the project from
    whose collection the text comes, if it had a hand in it: "llama.cpp" (MIT), "vLLM" (Apache-2.0)
    or "Unsloth" (Apache-2.0); else the model's makers alone."""

    licence: str
    origin: str
    by: str = ""


PUBLISHED = {
    "apertus": Family(APACHE, "swiss-ai/Apertus-8B-Instruct-2509"),
    "apriel-1.5": Family(MIT, "ServiceNow-AI/Apriel-1.5-15b-Thinker", "Unsloth"),
    "deepseek-r1-distill": Family(MIT, "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B", "llama.cpp"),
    "deepseek-v3": Family(MIT, "deepseek-ai/DeepSeek-V3-0324", "vLLM"),
    "deepseek-v3.1": Family(MIT, "deepseek-ai/DeepSeek-V3.1"),
    "deepseek-v3.2": Family(MIT, "deepseek-ai/DeepSeek-V3.2", "llama.cpp"),
    "devstral": Family(APACHE, "mistralai/Devstral-Small-2507", "Unsloth"),
    "gigachat3.1": Family(MIT, "ai-sage/GigaChat3.1-10B-A1.8B"),
    "glm-4": Family(MIT, "zai-org/GLM-4-9B-0414", "vLLM"),
    "glm-4.6": Family(MIT, "zai-org/GLM-4.6"),
    "glm-4.7": Family(MIT, "zai-org/GLM-4.7-Flash"),
    "gpt-oss": Family(APACHE, "openai/gpt-oss-120b"),
    "granite-3.0": Family(APACHE, "ibm-granite/granite-3.0-8b-instruct", "vLLM"),
    "granite-3.3": Family(APACHE, "ibm-granite/granite-3.3-2b-instruct"),
    "granite-4.0": Family(APACHE, "ibm-granite/granite-4.0-h-small"),
    "hermes": Family(APACHE, "NousResearch/Hermes-2-Pro-Mistral-7B", "vLLM"),
    "internlm2": Family(APACHE, "internlm/internlm2_5-7b-chat", "vLLM"),
    "mimo-vl": Family(MIT, "XiaomiMiMo/MiMo-VL-7B-RL"),
    "minicpm5": Family(APACHE, "openbmb/MiniCPM5-1B"),
    "minimax-m1": Family(APACHE, "MiniMaxAI/MiniMax-M1-80k"),
    "ministral-3": Family(APACHE, "mistralai/Ministral-3-14B-Reasoning-2512"),
    "mistral-nemo": Family(APACHE, "mistralai/Mistral-Nemo-Instruct-2407"),
    "mistral-small-3.1": Family(APACHE, "mistralai/Mistral-Small-3.1-24B-Instruct-2503", "vLLM"),
    "mistral-small-3.2": Family(APACHE, "mistralai/Mistral-Small-3.2-24B-Instruct-2506"),
    "phi-3.5": Family(MIT, "microsoft/Phi-3.5-mini-instruct"),
    "phi-4-mini": Family(MIT, "microsoft/Phi-4-mini-instruct", "vLLM"),
    "qwen2.5": Family(APACHE, "Qwen/Qwen2.5-7B-Instruct"),
    "qwen3": Family(APACHE, "Qwen/Qwen3-0.6B"),
    "qwen3-coder": Family(APACHE, "Qwen/Qwen3-Coder-30B-A3B-Instruct"),
    "qwen3.5": Family(APACHE, "Qwen/Qwen3.5-4B"),
    "qwq": Family(APACHE, "Qwen/QwQ-32B"),
    "seed-oss": Family(APACHE, "ByteDance-Seed/Seed-OSS-36B-Instruct"),
    "smollm3": Family(APACHE, "HuggingFaceTB/SmolLM3-3B", "Unsloth"),
    "step-3.5": Family(APACHE, "stepfun-ai/Step-3.5-Flash"),
}
SHAPES = (
    "command-r7b",
    "deepseek-r1-joins",  # as first published: joins arguments, asks for content that is none
    "exaone-4",
    "gemma-3",
    "gemma-3-pythonic",
    "glm-4.5",
    "kimi-k2",
    "lfm2",  # shows no calls of the past
    "lfm2.5",
    "llama-3",
    "llama-3.2-pythonic",  # writes texts without quotes
    "llama-guard",
    "minimax-m2",
    "nemotron",
    "olmo-3",
    "qwen3-2507-instruct",
    "qwen3-2507-thinking",
    "xlam-2",
)
FAMILIES = sorted((*PUBLISHED, *SHAPES))


def source(family: str) -> str:
    """The template's text."""
    folder = HERE / ("published" if family in PUBLISHED else "shapes")
    return (folder / f"{family}.jinja").read_text(encoding="utf-8")
