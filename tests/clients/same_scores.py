"""lm-eval scores a model by our server and by transformers; both must be the same.

Run by hand, since it needs torch beside lm-eval (docs/testing.md says how). The model is SmolLM2,
from its GGUF file, in float32 on both sides. The tasks are made here, from the pages of docs/.
"""

import argparse
import json
import math
import random
import sys
import tempfile
from pathlib import Path

import lm_eval
from lm_eval.tasks import TaskManager
from transformers import AutoTokenizer

sys.path.insert(0, str(Path(__file__).parents[1]))
from servers import Server

DOCS = Path(__file__).parents[2] / "docs"
NAME = "smollm2"
CONTEXT = 2_048
LETTERS = 1_200  # of a piece of a page
CLOSE = {"rel_tol": 1e-5, "abs_tol": 1e-3}  # what orders of summation cost in float32
TASKS = {
    "endings": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{begin}}",
        "doc_to_choice": "{{endings}}",
        "doc_to_target": "{{right}}",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "last_words": {
        "output_type": "loglikelihood",
        "doc_to_text": "{{begin}}",
        "doc_to_target": " {{word}}",
        "metric_list": [{"metric": "perplexity"}, {"metric": "acc"}],
    },
    "pages": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    },
    "sums": {
        "output_type": "generate_until",
        "doc_to_text": "{{begin}}",
        "doc_to_target": "{{sum}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 24, "do_sample": False},
        "metric_list": [{"metric": "exact_match", "regexes_to_ignore": [" "]}],
    },
    "stories": {
        "output_type": "generate_until",
        "doc_to_text": "{{begin}}",
        "doc_to_target": "{{end}}",
        "generation_kwargs": {"until": ["\n\n", "##"], "max_gen_toks": 48, "do_sample": False},
        "metric_list": [{"metric": "chrf"}],
    },
}


def documents(count: int) -> dict[str, list[dict]]:
    """Of each task, as many; the same ones each time."""
    drawn = random.Random(0)
    pages = [page.read_text() for page in sorted(DOCS.glob("*.md"))]
    lines = [line for page in pages for line in page.splitlines() if line[:1].isalpha()]
    lines = [line for line in lines if 12 <= len(line.split()) <= 80]
    drawn.shuffle(lines)
    found: dict[str, list[dict]] = {name: [] for name in TASKS}
    for i in range(count):
        words = lines[i % len(lines)].split()
        half, right = len(words) // 2, drawn.randrange(4)
        begin, end = " ".join(words[:half]), " ".join(words[half : half + 8])
        others = [" ".join(line.split()[-8:]) for line in drawn.sample(lines, 3)]
        endings = [*others[:right], end, *others[right:]]
        found["endings"].append({"begin": begin, "endings": endings, "right": right})
        found["last_words"].append({"begin": " ".join(words[:-1]), "word": words[-1]})
        found["stories"].append({"begin": begin, "end": end})
        a, b, c = (drawn.randrange(1, 40) for _ in range(3))
        begin = f"3 + 4 = 7\n12 + 9 = 21\n{a} + {c} = {a + c}\n{a} + {b} ="
        found["sums"].append({"begin": begin, "sum": str(a + b)})
        page = pages[i % len(pages)]
        start = drawn.randrange(max(1, len(page) - LETTERS))
        found["pages"].append({"text": page[start : start + LETTERS]})
    return found


def write_tasks(folder: Path, count: int) -> None:
    """The tasks as lm-eval reads them; what is JSON is YAML as well."""
    for name, docs in documents(count).items():
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(doc) + "\n" for doc in docs))
        task = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(data)}},
            "test_split": "test",
            **TASKS[name],
        }
        (folder / f"{name}.yaml").write_text(json.dumps(task))


def scores(model: str, arguments: dict, tasks: list[str], folder: Path) -> dict:
    """What lm-eval finds, with all samples."""
    return lm_eval.simple_evaluate(
        model=model,
        model_args=arguments,
        tasks=tasks,
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        log_samples=True,
        bootstrap_iters=0,
    )


def numbers(value) -> list[float]:
    """Log-likelihoods among the answers to one document."""
    if isinstance(value, float):
        return [value]
    return [n for part in value for n in numbers(part)] if isinstance(value, list | tuple) else []


def texts(value) -> list[str]:
    """Generated texts, and whether a target was the greedy one, among answers."""
    if isinstance(value, str | bool):
        return [str(value)]
    return [t for part in value for t in texts(part)] if isinstance(value, list | tuple) else []


def compare(ours: dict, theirs: dict) -> list[dict]:
    """Of each task both scores, and how far single answers are apart."""
    rows = []
    for name in ours["samples"]:
        pairs = list(zip(ours["samples"][name], theirs["samples"][name], strict=True))
        assert all(a["doc_hash"] == b["doc_hash"] for a, b in pairs)
        answers = [(a["resps"], b["resps"]) for a, b in pairs]
        both = [pair for a, b in answers for pair in zip(numbers(a), numbers(b), strict=True)]
        metrics = [key for key in ours["results"][name] if key.endswith(",none")]
        metrics = [key for key in metrics if "stderr" not in key]
        rows.append(
            {
                "task": name,
                "documents": len(pairs),
                "ours": {key[:-5]: ours["results"][name][key] for key in metrics},
                "theirs": {key[:-5]: theirs["results"][name][key] for key in metrics},
                "furthest": max((abs(x - y) for x, y in both), default=0.0),
                "not_close": sum(not math.isclose(x, y, **CLOSE) for x, y in both),
                "other_texts": sum(texts(a) != texts(b) for a, b in answers),
            }
        )
    return rows


def same(row: dict) -> bool:
    close = all(
        math.isclose(row["ours"][key], row["theirs"][key], rel_tol=1e-4) for key in row["ours"]
    )
    return close and not row["not_close"] and not row["other_texts"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, help="the GGUF file")
    parser.add_argument("--server-python", required=True, help="a Python that has pipeinfer")
    parser.add_argument("--tasks", default=",".join(TASKS), help="with commas between")
    parser.add_argument("--count", type=int, default=100, help="documents of each task")
    options = parser.parse_args()
    tasks = options.tasks.split(",")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tasks(folder, options.count)
        where = {
            "pretrained_model_name_or_path": options.file.parent,
            "gguf_file": options.file.name,
        }
        AutoTokenizer.from_pretrained(**where).save_pretrained(folder / NAME)
        flags = ("--served-model-name", NAME, "--dtype", "float32")
        with Server(str(options.file), *flags, python=options.server_python) as server:
            ours = scores(
                "local-completions",
                {
                    "model": NAME,
                    "base_url": f"{server.url}/v1/completions",
                    "tokenizer_backend": "huggingface",
                    "tokenizer": str(folder / NAME),
                    "num_concurrent": 8,
                    "max_length": CONTEXT,
                },
                tasks,
                folder,
            )
        theirs = scores(
            "hf",
            {
                "pretrained": str(options.file.parent),
                "gguf_file": options.file.name,
                "tokenizer": str(folder / NAME),
                "dtype": "float32",
                "device": "cpu",
                "max_length": CONTEXT - 1,  # the other leaves room for a token
            },
            tasks,
            folder,
        )
    rows = compare(ours, theirs)
    for row in rows:
        print(json.dumps({**row, "same": same(row)}))
    return 0 if all(map(same, rows)) else 1


if __name__ == "__main__":
    sys.exit(main())
