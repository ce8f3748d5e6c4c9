"""A request whose logits are no numbers, beside others in the same steps, pages and prefixes."""

from __future__ import annotations

import numpy as np
import pytest
from cores import Cores

from checkpoints import make_checkpoint
from pipeinfer.params import RequestParams
from pipeinfer.settings import Settings

POISON = 261
SHARED = list(range(40, 80))  # two whole pages of 16, and a half
PLAIN = RequestParams(temperature=0.0, max_tokens=12, ignore_eos=True)
KNOBS = (
    {}, {"top_k": 4}, {"top_p": 0.9, "presence_penalty": 0.5},
    {"repetition_penalty": 1.3, "min_tokens": 9, "stop_token_ids": (3, 4)},
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(
        tmp_path_factory.mktemp("poisoned"), "Qwen3ForCausalLM", tokenizer=False, poison=POISON
    )


def cores(folder, **changes) -> Cores:
    settings = {"kv_pages": 24, "page_size": 16, "max_running": 6} | changes
    return Cores(folder, Settings(model=str(folder), **settings), budget=64)


def good(count: int = 8) -> list[tuple[list[int], RequestParams]]:
    random = np.random.default_rng(3)
    made = []
    for index in range(count):
        prompt = random.integers(0, 250, int(random.integers(2, 30))).tolist()
        params = RequestParams(
            temperature=0.8 * (index % 2), max_tokens=14, ignore_eos=True, **KNOBS[index % 4]
        )
        made.append(((SHARED if index % 3 else []) + prompt, params))
    return made


def serve(made: Cores, bad: int, repeat: int = 1) -> dict[str, list[int]]:
    """All good requests, with so many bad ones between them."""
    kinds = ([POISON], [*SHARED[:16], POISON, *range(30)], [*SHARED, 5, POISON, 7])
    for again in range(repeat):
        for index, (prompt, params) in enumerate(good()):
            for number in range(bad):
                made.submit(f"b{again}-{index}-{number}", kinds[(index + number) % 3], PLAIN)
            made.submit(f"g{again}-{index}", prompt, params, seed=index)
        made.run()
    return {name: ids for name, ids in made.outputs.items() if name[0] == "g"}


@pytest.mark.parametrize("changes", [{}, {"cache": "naive", "overlap_depth": 1}])
def test_others_get_the_tokens_that_they_get_without_it(folder, changes):
    expected = serve(cores(folder, **changes), 0, 2)
    made = cores(folder, **changes)
    assert serve(made, 2, 2) == expected
    ends = {name[0]: {e for n, e in made.finished.items() if n[0] == name[0]} for name in "bg"}
    assert ends == {"b": {"error"}, "g": {"length"}}
    stats, scheduled = made.engine.stats(), made.scheduler.stats()
    assert stats["slots_used"] == 0 and scheduled["epochs_total"] == 1
    assert scheduled["bad_logits_total"] == 32 <= stats["bad_rows_total"]
    assert stats["pages_free"] + stats["pages_evictable"] == stats["pages_total"]


@pytest.mark.parametrize("ends", ["aborted", "bad"])
def test_no_nan_stays_in_a_free_page(folder, ends):
    """Attention kernels there are that multiply what a page's former owner left behind a row."""
    from pipeinfer.messages import Abort

    made = cores(folder)
    for number in range(4):
        made.submit(f"b{number}", [number, POISON, *range(40)], PLAIN)
        if ends == "aborted":
            made.run(lambda: made.engine.stats()["computed_tokens_total"] > 10)
            made._to_scheduler(Abort(f"b{number}", 1))
        made.run()
    made.submit("g", [1, 2, 3], PLAIN)
    made.run()
    assert made.finished["g"] == "length"
    pool = made.loaded.runner.pool
    assert not any(part.isnan().any() for part in (*pool.k, *pool.v))
