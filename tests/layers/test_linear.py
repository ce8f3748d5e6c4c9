"""Merged and split weights are laid out as the checkpoint's matrices say."""

from __future__ import annotations

import pytest
import torch

from pipeinfer.layers.linear import (
    Embedding,
    LMHead,
    RowParallelLinear,
    VocabParallelWeight,
    merged_gate_up,
    merged_qkv,
)
from pipeinfer.layers.placement import Placement, Shard, WeightSource

HIDDEN, HEADS, HEAD_DIM = 24, 8, 4


def placement(rank: int, size: int) -> Placement:
    return Placement(Shard(rank, size), torch.float32, torch.device("cpu"))


def filled(sources: list[WeightSource], stored: dict[str, torch.Tensor]) -> None:
    for source in sources:
        assert stored[source.name].shape == source.shape
        source.target.copy_(stored[source.name][source.slices])


@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_every_rank_projects_onto_its_own_heads(ranks: int, kv_heads: int) -> None:
    torch.manual_seed(0)
    stored = {
        f"x.{name}.{kind}": torch.randn(count * HEAD_DIM, *columns)
        for name, count in (("q_proj", HEADS), ("k_proj", kv_heads), ("v_proj", kv_heads))
        for kind, columns in (("weight", (HIDDEN,)), ("bias", ()))
    }
    x = torch.randn(3, HIDDEN)
    whole = {
        name: (x @ stored[f"x.{name}.weight"].T + stored[f"x.{name}.bias"]).view(3, -1, HEAD_DIM)
        for name in ("q_proj", "k_proj", "v_proj")
    }
    for rank in range(ranks):
        layer = merged_qkv(HIDDEN, HEADS, kv_heads, HEAD_DIM, True, placement(rank, ranks))
        filled(list(layer.sources("x.")), stored)
        mine = HEADS // ranks
        queries = range(rank * mine, (rank + 1) * mine)
        group = HEADS // kv_heads  # query heads that share a KV head
        kv = sorted({query // group for query in queries})
        expected = [whole["q_proj"][:, queries], whole["k_proj"][:, kv], whole["v_proj"][:, kv]]
        got = layer(x).view(3, -1, HEAD_DIM)
        torch.testing.assert_close(got, torch.cat(expected, dim=1))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_gate_and_up_keep_the_same_share(ranks: int) -> None:
    stored = {f"{name}.weight": torch.randn(16, HIDDEN) for name in ("gate_proj", "up_proj")}
    for rank in range(ranks):
        layer = merged_gate_up(HIDDEN, 16, False, placement(rank, ranks))
        filled(list(layer.sources("")), stored)
        gate, up = layer.weight.weight.chunk(2)
        share = slice(rank * 16 // ranks, (rank + 1) * 16 // ranks)
        assert torch.equal(gate, stored["gate_proj.weight"][share])
        assert torch.equal(up, stored["up_proj.weight"][share])


def test_row_parts_add_up_and_the_bias_counts_once() -> None:
    stored = {"o.weight": torch.randn(HIDDEN, 16), "o.bias": torch.randn(HIDDEN)}
    x = torch.randn(5, 16)
    partials: list[torch.Tensor] = []

    class Collect:
        """Stands where the other ranks' sums would arrive: adds what earlier ranks gave."""

        def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
            partials.append(partial)
            return torch.stack(partials).sum(dim=0)

        def all_gather(self, partial: torch.Tensor) -> torch.Tensor:
            raise AssertionError("a row-parallel layer gathers nothing")

    for rank in range(4):
        where = Placement(Shard(rank, 4), torch.float32, torch.device("cpu"), Collect())
        layer = RowParallelLinear("o", 16, HIDDEN, True, where)
        filled(list(layer.sources("")), stored)
        assert layer.weight.weight.shape == (HIDDEN, 4)
        total = layer(x[:, rank * 4 : rank * 4 + 4])
    expected = x @ stored["o.weight"].T + stored["o.bias"]
    torch.testing.assert_close(total, expected)


@pytest.mark.parametrize(("total", "size"), [(7, 2), (4, 8)])
def test_uneven_spans_are_refused(total: int, size: int) -> None:
    with pytest.raises(ValueError, match=f"{total} does not divide by {size}"):
        Shard(0, size).span(total)


def test_kv_heads_that_do_not_divide_the_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="8 ranks do not divide by 3 KV heads"):
        Shard(0, 8).kv_span(3)


def test_padded_vocabulary_rows_are_zero_and_never_logits() -> None:
    ranks = [VocabParallelWeight("e", 10, 4, placement(rank, 4)) for rank in range(4)]
    assert [(rows.start, rows.stop) for rows in ranks] == [(0, 3), (3, 6), (6, 9), (9, 10)]
    assert torch.all(ranks[3].weight.weight[1:] == 0)
    rows = VocabParallelWeight("e", 10, 4, placement(0, 1))
    weight = rows.weight.weight.normal_()
    hidden = torch.randn(2, 4)
    torch.testing.assert_close(LMHead(rows, placement(0, 1))(hidden), hidden @ weight.T)
    assert torch.equal(Embedding(rows, placement(0, 1))(torch.tensor([9, 0])), weight[[9, 0]])
