"""Which architectures there are, and the module that builds each; nothing is imported until asked.

Knows no torch: the tokenizer and the gateway read configurations too.
"""

from __future__ import annotations

# Name in config.json -> "module:builder"; a builder takes (ModelConfig, Placement).
ARCHITECTURES = {
    "Gemma3ForCausalLM": "pipeinfer.models.gemma3:build",
    "Glm4ForCausalLM": "pipeinfer.models.glm4:build",
    "Glm4MoeForCausalLM": "pipeinfer.models.glm4_moe:build",
    "GlmForCausalLM": "pipeinfer.models.glm:build",
    "GptOssForCausalLM": "pipeinfer.models.gpt_oss:build",
    "LlamaForCausalLM": "pipeinfer.models.llama:build",
    "MistralForCausalLM": "pipeinfer.models.mistral:build",
    "MixtralForCausalLM": "pipeinfer.models.mixtral:build",
    "Qwen2ForCausalLM": "pipeinfer.models.qwen2:build",
    "Qwen2MoeForCausalLM": "pipeinfer.models.qwen2_moe:build",
    "Qwen3ForCausalLM": "pipeinfer.models.qwen3:build",
    "Qwen3MoeForCausalLM": "pipeinfer.models.qwen3_moe:build",
}
