"""The comparison with llama.cpp: prompts, times, and the file without its quantization."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, dequantize, quantize

from bench import TOOL, llama
from bench.llama import Case, Pieces, Seen


def test_no_two_prompts_share_a_token_and_a_text_that_is_too_short_is_refused():
    pieces = Pieces(range(9_000))
    work = llama.warm_up(pieces, 4) + llama.cases(pieces, 4)
    ids = [token for case in work for prompt in case.prompts for token in prompt]
    assert len(set(ids)) == len(ids) == pieces.used
    together = next(case for case in work if case.name == "4 streams")
    assert [len(prompt) for prompt in together.prompts] == [128] * 4 and not together.flash
    lengths = [len(case.prompts[0]) for case in work if case.name.startswith("prompt of")]
    assert lengths == [128] * 2 + [1_000] * 2
    with pytest.raises(ValueError, match="fewer than"):
        llama.cases(Pieces(range(100)), 1)


def test_decoding_counts_while_all_streams_decode():
    case = Case("2 streams", [[1] * 10, [2] * 30], 3, flash=False)
    seen = Seen([[(1.0, [5]), (2.0, [6]), (4.0, [7])], [(2.0, [5]), (3.0, [6]), (6.0, [7])]])
    found = llama.numbers(case, seen)
    assert found["2 streams: decode tokens/s"] == pytest.approx(2 / 2.0)  # after 2.0, until 4.0
    assert found["2 streams: all tokens/s"] == pytest.approx(6 / 6.0)
    assert found["2 streams: time to first token, ms"] == pytest.approx(1_500.0)


def test_a_prompt_counts_until_its_first_token_and_the_median_of_a_round_is_taken():
    cases = [Case("prompt of 10", [[1] * 10], 1, flash=True)] * 3
    seen = [Seen([[(seconds, [9])]]) for seconds in (0.1, 5.0, 0.2)]
    assert llama.of_round(cases, seen) == {"prompt of 10: prompt tokens/s": pytest.approx(50.0)}


def test_missing_tokens_are_no_result():
    with pytest.raises(RuntimeError, match=r"\[1\] tokens instead of 2"):
        llama.numbers(Case("x", [[1]], 2, flash=False), Seen([[(1.0, [5])]]))


def test_ratios_are_of_neighbours_in_one_round():
    rounds = {"a": [{"n": 10.0}, {"n": 40.0}, {"n": 90.0}],
              "b": [{"n": 5.0}, {"n": 10.0}, {"n": 30.0}]}  # fmt: skip
    found = llama.compared(rounds, "a")["n"]
    assert found["a"] == {"median": 40.0, "low": 10.0, "high": 90.0}
    assert found["ratio to b"] == {"median": 3.0, "low": 2.0, "high": 4.0}


def test_outputs_agree_until_they_part():
    assert llama.equal_beginning([[1, 2, 3, 4], [7, 8]], [[1, 2, 9, 4], [7, 8]]) == 4 / 6
    assert llama.equal_beginning([[1]], [[2]]) == 0.0


@pytest.fixture
def quantized(tmp_path: Path) -> Path:
    """A GGUF file with a matrix in Q4_1, a vector in float32, and metadata of several kinds."""
    writer = GGUFWriter(tmp_path / "small.gguf", "llama")
    writer.add_file_type(3)
    writer.add_block_count(1)
    writer.add_token_list(["a", "b", "c"])
    writer.add_key_value("general.weight", 0.5, GGUFValueType.FLOAT32)
    matrix = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32)
    kind = GGMLQuantizationType.Q4_1
    writer.add_tensor("blk.0.attn_q.weight", quantize(matrix, kind), raw_dtype=kind)
    writer.add_tensor("blk.0.attn_norm.weight", np.arange(8, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path / "small.gguf"


def test_half_precision_file_has_the_same_model(quantized, tmp_path):
    before = GGUFReader(quantized)
    after = GGUFReader(llama.write(quantized, tmp_path / "f16.gguf"))
    values = {name: field.contents() for name, field in after.fields.items()}
    kept = {name: field.contents() for name, field in before.fields.items()}
    assert values == kept | {"general.file_type": 1}
    old, new = ({t.name: t for t in reader.tensors} for reader in (before, after))
    assert list(old) == list(new)
    matrix, vector = "blk.0.attn_q.weight", "blk.0.attn_norm.weight"
    assert new[matrix].tensor_type == GGMLQuantizationType.F16
    expected = dequantize(old[matrix].data, old[matrix].tensor_type)
    assert np.array_equal(new[matrix].data, expected.astype(np.float16))
    assert new[vector].tensor_type == GGMLQuantizationType.F32
    assert np.array_equal(new[vector].data, old[vector].data)


def test_a_model_that_is_no_gguf_file_is_refused(capsys):
    assert TOOL.main(["llama", "no-such-file.gguf", "--llama-python", "python"]) == 2
    assert "must be a .gguf file" in capsys.readouterr().err


def test_summary_compares_every_side_with_ours():
    work = [Case("1 stream", [[1, 2]], 2, flash=False)]
    one = [[Seen([[(1.0, [5]), (2.0, [6])]])]]
    other = [[Seen([[(0.5, [5]), (0.75, [7])]])]]
    rounds = {llama.OURS: one, llama.QUANTIZED: other, llama.HALF: one}
    found = llama.summary(work, rounds)
    assert found["equal_tokens"] == {llama.QUANTIZED: 0.5, llama.HALF: 1.0}
    rate = found["numbers"]["1 stream: decode tokens/s"]
    assert rate[f"ratio to {llama.QUANTIZED}"]["median"] == pytest.approx(0.25)
