"""Decoders that transformers builds, in bfloat16 on a GPU: their logits, and which have graphs."""

from __future__ import annotations

import numpy as np
import pytest
from test_cuda_parity import AGREEMENT, RELATIVE_ERROR, compare, cores, generate

from foreign_checkpoints import SERVED, VOCAB_SIZE, write_foreign

pytestmark = pytest.mark.gpu

EAGER = {"gemma2"}  # a soft cap: the torch backend's, which has no graphs


@pytest.mark.parametrize("model_type", SERVED)
def test_a_decoder_of_transformers_is_as_close_to_float32_as_transformers(tmp_path, model_type):
    folder = write_foreign(tmp_path, model_type)
    random = np.random.default_rng(0)
    asked = [random.integers(0, VOCAB_SIZE - 8, n).tolist() for n in (3, 30, 64, 90, 150, 200)]
    made = cores(folder, 64, model_impl="transformers", dtype="bfloat16")
    generate(made, wanted=24, asked=asked)
    found = compare(folder, made, asked)
    sizes = made.loaded.graph_sizes
    print(
        f"FOREIGN {model_type:16} {made.loaded.attention:10} graphs {len(sizes)}: error "
        f"{found.error:.4f} (transformers {found.usual_error:.4f}), agreement "
        f"{found.agreement:.4f} ({found.usual_agreement:.4f})"
    )
    assert made.loaded.transformers
    assert bool(sizes) == (model_type not in EAGER)
    assert found.error < max(RELATIVE_ERROR, 1.5 * found.usual_error)
    assert found.agreement >= min(AGREEMENT, found.usual_agreement - 0.02)
