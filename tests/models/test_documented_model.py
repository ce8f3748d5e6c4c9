"""The model of docs/add-a-model.md, as a reader would copy it, beside transformers."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import checkpoints
from dense_attention import dense_causal
from pipeinfer.checkpoint import config
from pipeinfer.models.loading import build_model, check_checkpoint, load_weights

PAGE = (Path(__file__).parents[2] / "docs/add-a-model.md").read_text()
LENGTH, TOLERANCE = 48, 1e-4


def entry(start: str) -> tuple[str, str]:
    """Key and value of the line that the page adds to a table, as Python texts."""
    [line] = re.findall(rf"^\+ +(.*: {re.escape(start)}.*),$", PAGE, re.MULTILINE)
    key, _, value = line.partition(": ")
    return key.strip('"'), value


@torch.inference_mode()
def test_the_documented_model_gives_the_logits_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [source] = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    name, target = entry('"pipeinfer.models.')
    module = ModuleType(target.strip('"').partition(":")[0])
    exec(compile(source, "docs/add-a-model.md", "exec"), vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(config.ARCHITECTURES, name, target.strip('"'))
    family = eval(entry("Family(")[1], vars(config))
    monkeypatch.setitem(config.FAMILIES, name, family)
    [model_type] = re.findall(rf'^\+ +"{name}": "(\w+)",$', PAGE, re.MULTILINE)
    monkeypatch.setitem(checkpoints.ALL_ARCHITECTURES, name, model_type)

    folder = checkpoints.make_checkpoint(tmp_path, name)
    described = config.read_config(folder)
    check_checkpoint(folder, described)
    model = build_model(described, dtype=torch.float32)
    load_weights(model, folder)
    tokens = torch.randint(0, 256, (LENGTH,), generator=torch.Generator().manual_seed(1))
    hidden = model(tokens, torch.arange(LENGTH), dense_causal(model.attention_shapes()))
    ours = model.logits(hidden).float()
    theirs = checkpoints.load_reference(folder)(tokens[None]).logits[0].float()
    assert float((ours - theirs).abs().max() / theirs.abs().max()) < TOLERANCE
