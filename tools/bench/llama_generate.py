"""llama.cpp through llama-cpp-python's low-level calls: whole batches of sequences, greedy.

A program of its own, for an interpreter with llama_cpp and nothing else of this checkout:
`llama_generate.py THREADS tokens MODEL TEXT_FILE` prints the text's token ids, `... THREADS texts
MODEL IDS.json` the texts of lists of ids, `... THREADS run MODEL WORK.json` generates.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from pathlib import Path
from typing import Any

import llama_cpp as lib
import numpy as np

BATCH = 2048  # tokens given at once: prompts of a batch go in together
PIECE = 256  # bytes; no token's text is longer


class Engine:
    """A context of a model for `streams` sequences of up to `length` tokens each."""

    def __init__(
        self, model: lib.llama_model_p, threads: int, streams: int, length: int, flash: bool
    ) -> None:
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_seq_max = streams * length, streams
        params.n_batch, params.n_threads, params.n_threads_batch = BATCH, threads, threads
        params.flash_attn_type = int(flash)
        self.context = lib.llama_init_from_model(model, params)
        if not self.context:
            raise RuntimeError(f"no context for {streams} sequences of {length} tokens")
        self.vocabulary = lib.llama_model_get_vocab(model)
        self.words = lib.llama_vocab_n_tokens(self.vocabulary)
        self.batch = lib.llama_batch_init(BATCH, 0, 1)

    def generate(self, prompts: list[list[int]], wanted: int) -> dict[str, Any]:
        """[[seconds since the start, ids]] of every stream; ends of sequences are ignored."""
        lib.llama_memory_clear(lib.llama_get_memory(self.context), False)
        streams: list[list[Any]] = [[] for _ in prompts]
        begin = time.perf_counter()
        chosen = self._prompts(prompts)
        for step in range(wanted):
            now = time.perf_counter() - begin
            for stream, token in enumerate(chosen):
                streams[stream].append([now, [token]])
            if step + 1 < wanted:
                rows = [
                    (token, len(prompts[stream]) + step, stream, True)
                    for stream, token in enumerate(chosen)
                ]
                chosen = list(self._decode(rows).values())
        return {"streams": streams}

    def _prompts(self, prompts: list[list[int]]) -> list[int]:
        """The first token of every stream, from as few calls as there must be."""
        rows = [
            (token, position, stream, position + 1 == len(prompt))
            for stream, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        chosen: dict[int, int] = {}
        for begin in range(0, len(rows), BATCH):
            chosen |= self._decode(rows[begin : begin + BATCH])
        return [chosen[stream] for stream in range(len(prompts))]

    def _decode(self, rows: list[tuple[int, int, int, bool]]) -> dict[int, int]:
        """{stream: likeliest next token} of the rows (token, position, stream, whether asked)."""
        batch = self.batch
        batch.n_tokens = len(rows)
        for index, (token, position, stream, asked) in enumerate(rows):
            batch.token[index], batch.pos[index], batch.logits[index] = token, position, asked
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, stream
        if code := lib.llama_decode(self.context, batch):
            raise RuntimeError(f"llama_decode gave {code} for {len(rows)} tokens")
        asked_for = [(index, row[2]) for index, row in enumerate(rows) if row[3]]
        return {stream: self._likeliest(index) for index, stream in asked_for}

    def _likeliest(self, index: int) -> int:
        logits = lib.llama_get_logits_ith(self.context, index)
        return int(np.ctypeslib.as_array(logits, (self.words,)).argmax())


def load(file: str, extra_buffers: bool) -> lib.llama_model_p:
    """The model. `extra_buffers`: with weights rearranged for the processor, such as for AMX."""
    params = lib.llama_model_default_params()
    params.use_extra_bufts = extra_buffers
    model = lib.llama_model_load_from_file(file.encode(), params)
    if not model:
        raise RuntimeError(f"{file}: llama.cpp cannot load it")
    return model


def tokens(file: str, text: bytes) -> list[int]:
    """The ids of a text, without special ones around it."""
    vocabulary = lib.llama_model_get_vocab(load(file, False))
    ids = (lib.llama_token * len(text))()
    count = lib.llama_tokenize(vocabulary, text, len(text), ids, len(text), False, False)
    return list(ids[:count])


def texts(file: str, outputs: list[list[int]]) -> list[str]:
    """What the ids of each output say, special ones left out."""
    vocabulary = lib.llama_model_get_vocab(load(file, False))
    piece = ctypes.create_string_buffer(PIECE)

    def one(token: int) -> bytes:
        size = lib.llama_token_to_piece(vocabulary, token, piece, PIECE, 0, False)
        return piece.raw[:size]

    return [b"".join(map(one, ids)).decode(errors="replace") for ids in outputs]


def run(file: str, threads: int, asked: dict[str, Any]) -> list[dict[str, Any]]:
    """Every case in its order, after the warm-up.

    Cases of as many streams share a context, as long as the longest of them needs.
    """
    model = load(file, asked["extra_buffers"])
    every = asked["warm"] + asked["cases"]
    lengths: dict[tuple[int, bool], int] = {}
    for case in every:
        length = max(map(len, case["prompts"])) + case["output"]
        key = len(case["prompts"]), case["flash"]
        lengths[key] = max(length, lengths.get(key, 0))
    engines = {
        key: Engine(model, threads, key[0], length, key[1]) for key, length in lengths.items()
    }
    results = [
        engines[len(case["prompts"]), case["flash"]].generate(case["prompts"], case["output"])
        for case in every
    ]
    return results[len(asked["warm"]) :]


@lib.llama_log_callback
def _silent(_level: int, _text: bytes, _data: ctypes.c_void_p) -> None:
    """llama.cpp tells of every tensor."""


def main() -> None:
    threads, command, model, file = sys.argv[1:]
    lib.llama_log_set(_silent, ctypes.c_void_p())
    lib.llama_backend_init()
    content = Path(file).read_bytes()
    if command == "tokens":
        result: Any = tokens(model, content)
    elif command == "texts":
        result = texts(model, json.loads(content))
    else:
        result = run(model, int(threads), json.loads(content))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
