"""The backend of docs/add-an-attention-backend.md, as a reader would copy it, beside float64."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from paged_cases import attention_inputs, dense, make_case

from pipeinfer.step import AttentionShape

PAGE = (Path(__file__).parents[2] / "docs/add-an-attention-backend.md").read_text()
SPANS = [(40, 1), (3, 1), (0, 1), (90, 1), (20, 9), (0, 12), (0, 30)]


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("soft_cap", [None, 0.5])
def test_the_documented_backend_attends_as_it_should(page_size, soft_cap):
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    [source] = [block for block in blocks if "class ByRow" in block]
    module = ModuleType("by_row")
    exec(compile(source, "docs/add-an-attention-backend.md", "exec"), vars(module))

    usual = AttentionShape(6, 2, head_dim=8, scale=8**-0.5, soft_cap=soft_cap)
    shapes = [
        usual,
        replace(usual, sliding_window=6),
        replace(usual, sinks=torch.linspace(-4, 6, 6)),
    ]
    case = make_case(shapes, SPANS, page_size, 5)
    backend = module.ByRow(shapes, torch.device("cpu"))
    backend.bind(case.pool, 100)
    with torch.inference_mode():
        metadata = backend.build_metadata(attention_inputs(case.step, case.pages))
        for layer in range(len(shapes)):
            out = backend.attend(layer, case.queries[layer], *case.stored(layer), metadata)
            assert float((out - dense(case, layer)).abs().max()) < 2e-6
