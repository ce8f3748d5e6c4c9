"""`agreement`: how often greedy answers stay the same when something is rounded to FP8.

The reference is transformers in float32. A way of rounding reads the reference's answers at once,
rounds what it rounds, and is asked for the best token at each place: up to the first other token
that is what it would have answered itself. pipeinfer answers by itself, and then reads the
reference's answers, too. Needs a GGUF file.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from pipeinfer import LLM, SamplingParams
from pipeinfer.engine.kv_store import CENTERING_TOKENS
from pipeinfer.kernels.formats import (
    E4M3,
    E4M3_MAX,
    hadamard_transform,
    quantize_rows,
    quantize_rows_min_error,
)

CHATS = Path(__file__).with_name("chats.txt")
ATTENTION = "pipeinfer-bench-agreement"
SCALES = [2.0 ** (step / 4) for step in range(-40, 13)]
TRIED_ON = 25  # of so many chats, one is what the best scales are found with

Heads = torch.Tensor  # float32 [batch, KV heads, tokens, head_dim]
Part = Callable[[int, Heads], Heads]  # of a layer's keys or values: as they are read again


@dataclass(frozen=True)
class Chat:
    """Ids of a prompt, and of the reference's answer."""

    prompt: list[int]
    answer: list[int]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this command."""
    add = parser.add_argument
    add("--file", type=Path, required=True, help="the model, a GGUF file of the Llama architecture")
    add("--chats", type=Path, default=CHATS, help="a file with a question on each line")
    add("--every", type=int, default=1, help="take one chat of so many")
    add("--answer-tokens", type=int, default=48)
    add("--batch", type=int, default=25)
    add("--ways", nargs="+", metavar="WAY", help="those whose names begin so; default: all")


def run(options: argparse.Namespace, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Of each way: answers that are equal, the mean place of the first other token in those that
    are not, and of how many tokens another one is best behind the reference's."""
    texts = options.chats.read_text(encoding="utf-8").splitlines()[:: options.every]
    settings = {"dtype": "float32", "max_model_len": 1024, **settings, "model": str(options.file)}
    found: dict[str, Any] = {}
    with Reference(options.file, options.batch) as reference:
        ids = reference.prompts(texts)
        answers = _answers(settings, ids, options.answer_tokens)
        chats = [Chat(*pair) for pair in zip(ids, answers, strict=True)]
        for name, way in _ways(reference, chats).items():
            if _wanted(name, options.ways):
                with way():
                    found[name] = _compared(chats, reference.best(chats))
                _show(name, found[name])
    for name, more in OWN.items():
        if _wanted(name, options.ways):
            with LLM(**settings | more) as llm:
                others = _answered(llm, ids, options.answer_tokens)
                forced = _compared(chats, _best_of(llm, chats))
            found[name] = _compared(chats, others) | {"tokens": forced["tokens"]}
            _show(name, found[name])
    return found


def _wanted(name: str, beginnings: Sequence[str] | None) -> bool:
    return beginnings is None or name.startswith(tuple(beginnings))


def _show(name: str, found: Mapping[str, float]) -> None:
    print(
        f"{name:40}{found['equal']:5.0f} of {found['answers']:.0f} equal, others from token "
        f"{found['first']:.1f} on; {found['tokens']:.2%} of tokens",
        flush=True,
    )


def _compared(chats: Sequence[Chat], others: Sequence[list[int]]) -> dict[str, float]:
    """`others`: as long as the answers, or what was answered without them."""
    firsts, differ = [], 0
    for chat, other in zip(chats, others, strict=True):
        same = [one == two for one, two in zip(chat.answer, other, strict=False)]
        differ += same.count(False)
        if other != chat.answer:
            firsts.append(same.index(False) if False in same else len(same))
    tokens = sum(len(chat.answer) for chat in chats)
    return {
        "answers": len(chats),
        "equal": len(chats) - len(firsts),
        "first": sum(firsts) / max(len(firsts), 1),
        "tokens": differ / tokens,
    }


def _answers(
    settings: Mapping[str, Any], prompts: Sequence[list[int]], tokens: int
) -> list[list[int]]:
    """Of pipeinfer, which in float32 gives transformers' (tests/smollm2)."""
    with LLM(**settings) as llm:
        return _answered(llm, prompts, tokens)


def _answered(llm: LLM, prompts: Sequence[list[int]], tokens: int) -> list[list[int]]:
    results = llm.generate(list(prompts), SamplingParams(temperature=0, max_tokens=tokens))
    return [list(result.outputs[0].token_ids) for result in results]


def _best_of(llm: LLM, chats: Sequence[Chat]) -> list[list[int]]:
    """pipeinfer's best token at each place of each answer, behind the tokens before it."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    results = llm.generate([chat.prompt + chat.answer[:-1] for chat in chats], params)
    found = []
    for chat, result in zip(chats, results, strict=True):
        scores = (result.prompt_logprobs or [])[len(chat.prompt) :]
        ranked = [{one.rank: token for token, one in (place or {}).items()} for place in scores]
        found.append([place[1] for place in ranked] + list(result.outputs[0].token_ids))
    return found


class Reference:
    """The model in transformers. keys, values: how they are rounded, if they are. attend: what its
    layers call."""

    def __init__(self, file: Path, batch: int) -> None:
        # Not with this module, which every command imports.
        from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer

        where = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
        AttentionInterface.register(ATTENTION, lambda *given, **more: self.attend(*given, **more))
        self.tokenizer = AutoTokenizer.from_pretrained(**where)
        self.model = AutoModelForCausalLM.from_pretrained(
            **where, dtype=torch.float32, attn_implementation=ATTENTION
        ).eval()
        self.attend = self._attend
        self.keys: Part | None = None
        self.values: Part | None = None
        self._batch = batch

    def __enter__(self) -> Reference:
        return self

    def __exit__(self, *error: object) -> None:
        del self.model  # pipeinfer's own may follow

    def prompts(self, texts: Sequence[str]) -> list[list[int]]:
        """Behind the chat template."""
        return [
            self.tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
            )
            for text in texts
        ]

    @torch.inference_mode()
    def best(self, chats: Sequence[Chat]) -> list[list[int]]:
        """The best token at each place of each answer, behind the tokens before it."""
        found: list[list[int]] = [[] for _ in chats]
        order = sorted(range(len(chats)), key=lambda at: len(chats[at].prompt + chats[at].answer))
        for begin in range(0, len(order), self._batch):
            part = order[begin : begin + self._batch]
            ids = [chats[at].prompt + chats[at].answer[:-1] for at in part]
            longest = max(map(len, ids))  # what stands behind a row changes nothing in it
            padded = torch.tensor([row + [0] * (longest - len(row)) for row in ids])
            hidden = self.model.model(input_ids=padded, use_cache=False).last_hidden_state
            for row, at in enumerate(part):
                places = hidden[row, len(chats[at].prompt) - 1 : len(ids[row])]
                found[at] = self.model.lm_head(places).argmax(-1).tolist()
        return found

    def _attend(
        self, module: Any, q: Heads, k: Heads, v: Heads, mask: object, scaling: float, **_: object
    ) -> tuple[torch.Tensor, None]:
        """As transformers calls it; keys are rotated. Masks are those of whole sequences."""
        k = k if self.keys is None else self.keys(module.layer_idx, k)
        v = v if self.values is None else self.values(module.layer_idx, v)
        out = scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scaling, enable_gqa=k.shape[1] != q.shape[1]
        )
        return out.transpose(1, 2).contiguous(), None

    @contextmanager
    def rounding(self, keys: Part | None = None, values: Part | None = None) -> Iterator[None]:
        """Meanwhile keys and values are."""
        self.keys, self.values = keys, values
        try:
            yield
        finally:
            self.keys = self.values = None

    @contextmanager
    @torch.no_grad()
    def weights(self, rounded: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
        """Meanwhile the matrices of layers are."""
        layers = self.model.model.layers.named_parameters()
        plain = {one: one.clone() for _, one in layers if one.dim() == 2}
        for one in plain:
            one.copy_(rounded(one))
        try:
            yield
        finally:
            for one, values in plain.items():
                one.copy_(values)


# ------------------------------------------------------------------------------ ways of rounding


def _ways(reference: Reference, chats: Sequence[Chat]) -> dict[str, Callable[[], Any]]:
    keys, values = _seen(reference, chats[::TRIED_ON])
    shifts = _shifts(reference)

    def plain(scales: Callable[[list[Heads]], list[torch.Tensor]]) -> Callable[[], Any]:
        return partial(reference.rounding, _by(scales(keys)), _by(scales(values)))

    ones = _by(_ones(keys))
    return {
        "nothing": partial(reference.rounding),
        "plain": plain(_ones),
        "best scale a layer": plain(partial(_best, heads=False)),
        "best scale a head": plain(partial(_best, heads=True)),
        "scale a head and token": partial(reference.rounding, _by_token, _by_token),
        "turned": partial(reference.rounding, _turned(ones), ones),
        "shifted": partial(reference.rounding, _shifted(ones, shifts), ones),
        "shifted and turned": partial(reference.rounding, _shifted(_turned(ones), shifts), ones),
        "keys alone": partial(reference.rounding, ones, None),
        "keys alone, shifted and turned": partial(
            reference.rounding, _shifted(_turned(ones), shifts), None
        ),
        "values alone": partial(reference.rounding, None, ones),
        "weights, scale by the largest": partial(reference.weights, _decoded(quantize_rows)),
        "weights, best of eight scales": partial(
            reference.weights, _decoded(quantize_rows_min_error)
        ),
    }


OWN = {
    "pipeinfer, --kv-cache-dtype fp8_e4m3": {"kv_cache_dtype": "fp8_e4m3"},
    "pipeinfer, --quantization fp8": {"quantization": "fp8"},
}


def _seen(reference: Reference, chats: Sequence[Chat]) -> tuple[list[Heads], list[Heads]]:
    """Keys and values of these chats, of each layer, [1, KV heads, all tokens, head_dim]."""
    layers = reference.model.config.num_hidden_layers
    keys, values = ([[] for _ in range(layers)] for _ in range(2))

    def keep(into: list[list[Heads]], layer: int, heads: Heads) -> Heads:
        into[layer].append(heads)
        return heads

    with reference.rounding(partial(keep, keys), partial(keep, values)):
        for chat in chats:
            reference.best([chat])
    return [torch.cat(one, 2) for one in keys], [torch.cat(one, 2) for one in values]


def _rounded(heads: Heads, scale: torch.Tensor) -> Heads:
    return (heads / scale).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3).float() * scale


def _by(scales: Sequence[torch.Tensor]) -> Part:
    return lambda layer, heads: _rounded(heads, scales[layer])


def _by_token(layer: int, heads: Heads) -> Heads:
    return _rounded(heads, heads.abs().amax(-1, keepdim=True).clamp(min=1e-12) / E4M3_MAX)


def _ones(seen: Sequence[Heads]) -> list[torch.Tensor]:
    return [torch.ones(1)] * len(seen)


def _best(seen: Sequence[Heads], heads: bool) -> list[torch.Tensor]:
    """Of SCALES those with the least square error over what is `seen`, of each layer or head."""
    found = []
    for one in seen:
        errors = [(_rounded(one, torch.tensor(s)) - one).square().sum((0, 2, 3)) for s in SCALES]
        errors = torch.stack(errors)
        errors = errors if heads else errors.sum(1, keepdim=True)
        found.append(torch.tensor(SCALES)[errors.argmin(0)].view(1, -1, 1, 1))
    return found


def _turned(part: Part) -> Part:
    return lambda layer, heads: hadamard_transform(part(layer, hadamard_transform(heads)))


def _shifted(part: Part, shifts: Sequence[torch.Tensor]) -> Part:
    return lambda layer, heads: part(layer, heads - shifts[layer]) + shifts[layer]


def _shifts(reference: Reference) -> list[torch.Tensor]:
    """What the engine subtracts (engine/kv_store.py), computed anew: [KV heads, 1, head_dim]."""
    config, found = reference.model.config, {}
    ids = np.random.RandomState(0).randint(0, config.vocab_size, CENTERING_TOKENS).tolist()
    group = config.num_attention_heads // config.num_key_value_heads

    def attend(module: Any, q: Heads, k: Heads, v: Heads, mask: object, **more: Any) -> Any:
        seen, _ = plain(module, q, k, k, mask, **more)  # keys as if they were values
        seen = seen.unflatten(2, (-1, group)).mean((0, 1, 3))
        found[module.layer_idx] = seen[:, None]
        return plain(module, q, k, v, mask, **more)

    plain, reference.attend = reference.attend, attend
    reference.best([Chat(ids[:1], ids[1:] + ids[:1])])
    reference.attend = plain
    return [found[layer] for layer in range(config.num_hidden_layers)]


def _decoded(
    how: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
) -> Callable[[torch.Tensor], torch.Tensor]:
    def rounded(weight: torch.Tensor) -> torch.Tensor:
        values, scale = how(weight)
        return values.float() * scale

    return rounded
