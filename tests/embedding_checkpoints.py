"""Checkpoints that make vectors, as sentence-transformers writes them, and the vectors that
transformers computes of them. Knows nothing of pipeinfer. Import it as
`import embedding_checkpoints`."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from checkpoints import make_checkpoint

PROMPTS = {"query": "Instruct: find it\nQuery:", "document": ""}
KINDS = "sentence_transformers.models"
LAST_TOKEN = {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}


WORDS = ["river", "stone", "lamp", "winter", "seven", "green", "engine", "letter", "cold", "bridge"]


def texts(count: int, seed: int = 3) -> list[str]:
    """Of 1 to 40 words."""
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(1, 40))) for _ in range(count)]


def with_modules(
    folder: Path,
    *kinds: str,
    pooling: dict[str, Any] | None = None,
    prompts: dict[str, Any] | None = None,
) -> Path:
    """Writes modules.json with `kinds` behind a Transformer and a Pooling of the last token."""
    listed = ["Transformer", "Pooling", *kinds]
    paths = ["", *(f"{n}_{kind}" for n, kind in enumerate(listed[1:], 1))]
    modules = [
        {"idx": n, "name": str(n), "path": path, "type": f"{KINDS}.{kind}"}
        for n, (kind, path) in enumerate(zip(listed, paths, strict=True))
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling or LAST_TOKEN))
    if prompts is not None:
        (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    return folder


def without_head(source: Path, folder: Path) -> Path:
    """A copy whose architecture and tensors are those of a model without a head for logits, and
    whose tokenizer ends each text with <|endoftext|>."""
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = [
        name.replace("ForCausalLM", "Model") for name in config["architectures"]
    ]
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    kept = {
        name.removeprefix("model."): tensor
        for name, tensor in tensors.items()
        if name != "lm_head.weight"
    }
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = TemplateProcessing(
        single="$A <|endoftext|>", special_tokens=[("<|endoftext|>", 256)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def expected_vectors(folder: Path, texts: list[str], normalize: bool = True) -> np.ndarray:
    """float32 [texts, hidden]: the last hidden state of each text's last token, by transformers."""
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    rows: list[torch.Tensor] = []
    with torch.inference_mode():
        for text in texts:
            ids = torch.tensor([tokenizer.encode(text).ids])
            rows.append(model(ids).last_hidden_state[0, -1])
    vectors = torch.stack(rows)
    return (torch.nn.functional.normalize(vectors) if normalize else vectors).numpy()


def cosines(found: Any, expected: np.ndarray) -> np.ndarray:
    """[n]: of each row of both."""
    a, b = np.asarray(found, dtype=np.float64), expected.astype(np.float64)
    return (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)


def write_reranker(folder: Path) -> Path:
    """A generating checkpoint that has the tokens "yes" and "no"."""
    made = make_checkpoint(folder, "Qwen3ForCausalLM", vocab_size=272)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(label, special=False, normalized=False) for label in LABELS])
    tokenizer.save(str(folder / "tokenizer.json"))
    return made


LABELS = ("no", "yes")
JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".'
)
SEARCH = "Given a web search query, retrieve relevant passages that answer the query"


def expected_scores(
    folder: Path, pairs: list[tuple[str, str]], instruction: str = SEARCH
) -> np.ndarray:
    """float32 [pairs], as Qwen3-Reranker's makers compute it: by the two logits behind the chat."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    labels = [tokenizer.convert_tokens_to_ids(label) for label in LABELS]
    found: list[torch.Tensor] = []
    with torch.inference_mode():
        for query, document in pairs:
            text = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
            chat = [{"role": "system", "content": JUDGE}, {"role": "user", "content": text}]
            prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
            ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt").input_ids
            found.append(model(ids).logits[0, -1, labels].softmax(0)[1])
    return torch.stack(found).numpy()
