"""How often greedy tokens of a real model are those that float32 would choose.

    python tests/gpu/gguf_agreement.py MODEL.gguf [--device cuda] [--dtype bfloat16]

Fifty texts through `LLM` and through transformers, in that dtype; then transformers in float32 says
for each token of either whether it would have chosen the same one behind the same ids: with the
file's weights ("exact"), and with these rounded to the dtype ("rounded"), so that what remains is
how it was computed. One line of JSON. Not a test: a tool beside the tests.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "smollm2")]

import torch  # noqa: E402
from smollm2_prompts import PROMPTS  # noqa: E402
from transformers import AutoModelForCausalLM, PreTrainedModel  # noqa: E402

from pipeinfer import LLM, SamplingParams  # noqa: E402

Texts = list[tuple[list[int], list[int]]]  # ids of prompts and of what follows


def ours(options: argparse.Namespace) -> Texts:
    with LLM(options.model, dtype=options.dtype, device=options.device, max_model_len=2048) as llm:
        params = SamplingParams(
            temperature=0, max_tokens=options.tokens, ignore_eos=not options.chat
        )
        if options.chat:
            asked = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
            outputs = llm.chat(asked, params, use_tqdm=False)
        else:
            outputs = llm.generate(list(PROMPTS), params, use_tqdm=False)
        return [(out.prompt_token_ids, out.outputs[0].token_ids) for out in outputs]


def load(path: Path, dtype: torch.dtype, device: str) -> PreTrainedModel:
    """What transformers makes of the file, in that dtype from the start: parts stay float32."""
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=dtype)
    return model.to(device)


@torch.inference_mode()
def theirs(model: PreTrainedModel, texts: Texts, tokens: int, least: int) -> Texts:
    """The same prompts, one by one: padding would be another computation."""
    made = []
    for prompt, _ in texts:
        ids = torch.tensor([prompt], device=model.device)
        done = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False,
            max_new_tokens=tokens, min_new_tokens=least,
        )  # fmt: skip
        made.append((prompt, done[0, len(prompt) :].tolist()))
    return made


@torch.inference_mode()
def agreement(model: PreTrainedModel, texts: Texts) -> float:
    """Of all tokens, the share that `model` chooses behind the ids before."""
    same = total = 0
    for prompt, answer in texts:
        ids = torch.tensor([prompt + answer], device=model.device)
        best = model(ids).logits[0, len(prompt) - 1 : -1].argmax(-1).tolist()
        same += sum(a == b for a, b in zip(best, answer, strict=True))
        total += len(answer)
    return same / total


def main() -> None:
    """Shares are ours and theirs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=str)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--chat", action="store_true", help="answers up to their ends, not so many")
    options = parser.parse_args()
    texts = ours(options)
    path = Path(options.model)
    dtype = getattr(torch, options.dtype)
    least = 0 if options.chat else options.tokens
    reference = theirs(load(path, dtype, options.device), texts, options.tokens, least)
    model = load(path, torch.float32, options.device)
    found = {"exact": [agreement(model, made) for made in (texts, reference)]}
    for weight in model.parameters():
        weight.data = weight.data.to(dtype).float()
    found["rounded"] = [agreement(model, made) for made in (texts, reference)]
    equal = sum(a == b for a, b in zip(texts, reference, strict=True))
    found |= {"equal_texts": equal, "texts": len(texts), "dtype": options.dtype}
    found["tokens"] = [sum(len(made) for _, made in some) for some in (texts, reference)]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
