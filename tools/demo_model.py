"""Trains and measures the bundled demo model: `demo_model.py train --out DIR`, `… eval --model DIR`.

The text comes from `pipeinfer.demo.tasks`, the model is transformers' Qwen3, the machine a CPU.
Knows nothing about serving: what it writes is an ordinary checkpoint folder.
"""

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers import AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from pipeinfer.demo import demo_path, tasks  # noqa: E402

PAD, START, END = 256, 257, 258
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|reserved_{i}|>" for i in range(5)))
IGNORED = -100
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' }}
{%- endif -%}
"""


# --- the checkpoint's files ---------------------------------------------------------------------


def byte_alphabet() -> list[str]:
    """Return the printable stand-in of every byte, as the ByteLevel pre-tokenizer writes it."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in kept]
    letters = {byte: chr(byte) for byte in kept}
    letters |= {byte: chr(256 + index) for index, byte in enumerate(moved)}
    return [letters[byte] for byte in range(256)]


def build_tokenizer() -> Tokenizer:
    """Return a tokenizer without merges: a token's id is its byte, so no text is ambiguous."""
    vocabulary = {letter: byte for byte, letter in enumerate(byte_alphabet())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIALS])
    return tokenizer


def build_model() -> Qwen3ForCausalLM:
    """Return a fresh model of 0.8 million parameters, just over 3 MB in float32."""
    config = Qwen3Config(
        vocab_size=256 + len(SPECIALS),
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=384,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=END,
        pad_token_id=PAD,
        dtype="float32",
        attn_implementation="sdpa",
    )
    return Qwen3ForCausalLM(config)


def save(model: Qwen3ForCausalLM, folder: Path) -> None:
    """Write `model` and everything that a server or transformers needs beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    build_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "clean_up_tokenization_spaces": False,
            "model_max_length": model.config.max_position_embeddings,
        },
    )
    # Temperature 0 is for servers that take their defaults from here; transformers ignores it.
    write_json(
        folder / "generation_config.json",
        {"do_sample": False, "temperature": 0.0, "eos_token_id": [END, PAD], "pad_token_id": PAD},
    )


def write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


# --- training text ------------------------------------------------------------------------------

SYSTEM_MESSAGES = (
    "You are a helpful assistant.",
    "You are the demo model of pipeinfer.",
    "Answer briefly.",
    "Be kind and precise.",
)
PARAPHRASES = {
    "What is pipeinfer?": ("what is pipeinfer", "Tell me about pipeinfer.", "Explain pipeinfer."),
    "What are the stages?": (
        "what are the stages of pipeinfer?",
        "Which stages are there?",
        "Name the stages.",
        "List the stages.",
    ),
    "What does the gateway do?": ("What is the gateway?", "what does the gateway do"),
    "What does the tokenizer do?": ("What is the tokenizer?", "what does the tokenizer do"),
    "What does the scheduler do?": ("What is the scheduler?", "what does the scheduler do"),
    "What does the engine do?": ("What is the engine?", "what does the engine do"),
    "What does the detokenizer do?": ("What is the detokenizer?", "what does the detokenizer do"),
    "How do I stream?": ("how do I stream", "How can I stream the answer?", "How does streaming work?"),
    "How do I start the server?": ("How do I start pipeinfer?", "how do I run pipeinfer?"),
    "How do I replay a stage?": ("how do I replay", "How does replay work?", "What is replay?"),
    "What happens if a stage dies?": (
        "Can I kill a stage?",
        "What if the engine dies?",
        "What happens when a stage crashes?",
    ),
    "How is memory managed?": ("What are pages?", "how does the cache work?", "What is a page?"),
    "Who are you?": ("who are you", "What are you?", "What model are you?"),
    "What can you do?": ("what can you do", "Help", "help", "What do you know?"),
    "Hello": ("hello", "Hi", "hi", "Hello!", "Hi!", "Hey", "Hello there", "Good morning"),
    "Thank you": ("thank you", "Thanks", "thanks", "Thank you!", "Thanks!"),
}
WORDS = sorted({word for text in (*tasks.ABOUT, *tasks.ABOUT.values()) for word in text.split()})
PRINTABLE = [chr(code) for code in range(0x21, 0x7F)]
UNICODE = [chr(code) for code in (*range(0xC0, 0x180), *range(0x391, 0x3CA), *range(0x410, 0x450))]
UNICODE += [chr(code) for code in (*range(0x4E00, 0x4F00), *range(0x1F600, 0x1F640))]


def text_to_copy(rng: random.Random, longest: int) -> str:
    """Return at most about `longest` bytes: most often letters and digits, at times anything."""
    length = rng.randint(1, longest)
    kind = rng.random()
    if kind < 0.55:
        return tasks.random_text(rng, length)
    if kind < 0.65:
        return tasks.random_text(rng, length, rng.choice(("abcdefghijklmnopqrstuvwxyz", "0123456789")))
    if kind < 0.75:
        return tasks.random_text(rng, length, PRINTABLE)
    if kind < 0.83:
        return tasks.random_text(rng, max(1, length // 3), UNICODE)
    words = (
        rng.choice(WORDS) if rng.random() < 0.5 else tasks.random_key(rng)
        for _ in range(max(1, length // 6))
    )
    return " ".join(words)


def about_turn(rng: random.Random) -> tasks.Turn:
    question = rng.choice(list(tasks.ABOUT))
    return rng.choice((question, *PARAPHRASES[question])), tasks.ABOUT[question]


@dataclass
class Conversation:
    """Turns of one conversation in the making, with the pairs that it has been told so far.

    `ease` in (0, 1] shortens copies and lists of pairs: the curriculum of the first steps.
    """

    rng: random.Random
    ease: float
    longest_copy: int
    known: dict[str, str]

    def turns(self) -> list[tasks.Turn]:
        """Return the next turn or turns."""
        rng = self.rng
        kind = rng.random()
        if kind < 0.40:
            longest = max(4, int(self.longest_copy * self.ease))
            return [tasks.copy_turn(rng, text_to_copy(rng, longest))]
        if kind < 0.75:
            return self.recall_turns()
        if kind < 0.83:
            return [tasks.count_task(rng)]
        if kind < 0.91:
            return [tasks.sum_task(rng)]
        return [about_turn(rng)]

    def recall_turns(self) -> list[tasks.Turn]:
        rng = self.rng
        if self.known and rng.random() < 0.6:
            key = rng.choice(list(self.known))
            return [tasks.ask_turn(rng, key, self.known[key])]
        pairs = tasks.random_pairs(rng, rng.randint(1, max(2, int(12 * self.ease))), list(self.known))
        self.known |= pairs
        stated = tasks.remember_text(pairs)
        if rng.random() < 0.3:
            return [(stated, tasks.ACKNOWLEDGED)]
        key = rng.choice(list(pairs))
        question, answer = tasks.ask_turn(rng, key, pairs[key])
        return [(f"{stated} {question}", answer)]


def encode(text: str) -> list[int]:
    return list(text.encode("utf-8"))


def message(role: str, content: str) -> list[int]:
    return [START, *encode(f"{role}\n{content}"), END, *encode("\n")]


def training_row(rng: random.Random, length: int, ease: float) -> tuple[list[int], list[int]]:
    """Return `length` tokens of one conversation and their labels: only answers are learnt."""
    tokens: list[int] = []
    labels: list[int] = []
    if rng.random() < 0.25:
        tokens += message("system", rng.choice((*SYSTEM_MESSAGES, text_to_copy(rng, 40))))
    labels += [IGNORED] * len(tokens)
    conversation = Conversation(rng, ease, min(100, length // 3), {})
    while len(tokens) < length:
        for question, answer in conversation.turns():
            prompt = message("user", question) + [START, *encode("assistant\n")]
            learnt = [*encode(answer), END]
            tokens += prompt + learnt + encode("\n")
            labels += [IGNORED] * len(prompt) + learnt + [IGNORED]
    return tokens[:length], labels[:length]


def batch(rng: random.Random, rows: int, length: int, ease: float) -> tuple[Tensor, Tensor]:
    """Return token ids and labels, both [rows, length] int64."""
    made = [training_row(rng, length, ease) for _ in range(rows)]
    return torch.tensor([row for row, _ in made]), torch.tensor([labels for _, labels in made])


# --- training -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Schedule:
    """How long to train. `tokens_per_step` counts every token of a batch, learnt or not."""

    seconds: float
    tokens_per_step: int
    peak_rate: float

    def rate(self, done: float) -> float:
        """Return the learning rate after the share `done` of the time: warm up, then cosine."""
        if done < 0.03:
            return self.peak_rate * (done / 0.03 + 0.01)
        return self.peak_rate * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (done - 0.03) / 0.97)))

    def shape(self, rng: random.Random, done: float) -> tuple[int, int, float]:
        """Return rows, length and ease of the next batch; long rows come with time."""
        lengths = (128, 256, 512, 1024)
        if done < 0.15:
            weights = (1.0, 0.0, 0.0, 0.0)
        elif done < 0.5:
            weights = (0.4, 0.5, 0.1, 0.0)
        else:
            weights = (0.25, 0.35, 0.25, 0.15)
        length = rng.choices(lengths, weights)[0]
        return max(1, self.tokens_per_step // length), length, min(1.0, 0.2 + done / 0.3)


def optimizers(model: Qwen3ForCausalLM, muon: bool) -> list[torch.optim.Optimizer]:
    """Return Muon for the layers' matrices and AdamW for the rest, or AdamW for everything."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    rest = [p for name, p in model.named_parameters() if not (p.ndim == 2 and "embed" not in name)]
    if not muon:
        return [torch.optim.AdamW(model.parameters(), lr=1.0, betas=(0.9, 0.98), weight_decay=0.01)]
    return [
        torch.optim.Muon(matrices, lr=1.0, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=1.0, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def train(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    rng = random.Random(args.seed)
    model = build_model()
    schedule = Schedule(args.minutes * 60, args.tokens, args.lr)
    opts = optimizers(model, args.muon)
    begin = time.monotonic()
    step = seen = 0
    saved = begin
    lossum = 0.0
    while (done := (time.monotonic() - begin) / schedule.seconds) < 1:
        ids, labels = batch(rng, *schedule.shape(rng, done))
        with torch.autocast("cpu", torch.bfloat16, enabled=args.bf16):
            hidden = model.model(ids).last_hidden_state[:, :-1]
            keep = labels[:, 1:] != IGNORED
            logits = model.lm_head(hidden[keep])
        loss = torch.nn.functional.cross_entropy(logits.float(), labels[:, 1:][keep])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for opt in opts:
            for group in opt.param_groups:
                group["lr"] = schedule.rate(done)
            opt.step()
            opt.zero_grad()
        step += 1
        seen += ids.numel()
        lossum += loss.item()
        if step % 50 == 0:
            t = time.monotonic() - begin
            print(f"{step} {t:.0f}s {seen/1e6:.2f}M {seen/t:.0f} tok/s loss {lossum/50:.4f}", flush=True)
            lossum = 0
        if time.monotonic() - saved > 300:
            save(model, args.out)
            saved = time.monotonic()
    save(model, args.out)


# --- measuring ----------------------------------------------------------------------------------


@torch.inference_mode()
def answers(model, tokenizer, conversations) -> list[str]:
    """Greedy."""
    prompts = []
    for turns in conversations:
        messages = []
        for q, a in turns[:-1]:
            messages += [{"role": "user", "content": q}, {"role": "assistant", "content": a}]
        messages.append({"role": "user", "content": turns[-1][0]})
        prompts.append(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    enc = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
    longest = max(len(turns[-1][1].encode()) for turns in conversations) + 2
    out = model.generate(**enc, max_new_tokens=longest, do_sample=False)
    return tokenizer.batch_decode(out[:, enc["input_ids"].shape[1]:], skip_special_tokens=True)


def evaluate(args) -> None:
    torch.set_num_threads(args.threads)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype="float32").eval()
    tok = AutoTokenizer.from_pretrained(args.model)
    rng = random.Random(args.seed)
    filler = lambda k: [tasks.copy_task(rng, 40) for _ in range(k)]
    suites: dict[str, Callable] = {
        "copy 10": lambda: [tasks.copy_task(rng, 10)],
        "copy 40": lambda: [tasks.copy_task(rng, 40)],
        "copy 80": lambda: [tasks.copy_task(rng, 80)],
        "copy 40 after 4": lambda: filler(4) + [tasks.copy_task(rng, 40)],
        "copy 40 after 9": lambda: filler(9) + [tasks.copy_task(rng, 40)],
        "recall of 3": lambda: [tasks.recall_task(rng, 3)],
        "recall of 8": lambda: [tasks.recall_task(rng, 8)],
        "recall of 8 after 2": lambda: tasks.recall_dialogue(rng, 8, filler(2)),
        "recall of 8 after 7": lambda: tasks.recall_dialogue(rng, 8, filler(7)),
        "count": lambda: [tasks.count_task(rng)],
        "sum": lambda: [tasks.sum_task(rng)],
        "about": lambda: [rng.choice(list(tasks.ABOUT.items()))],
    }
    for name, make in suites.items():
        conv = [make() for _ in range(args.examples)]
        got = answers(model, tok, conv)
        right = sum(g == c[-1][1] for g, c in zip(got, conv))
        print(f"{name:22s} {right}/{len(conv)}", flush=True)
        if args.show:
            bad = [(g, c[-1]) for g, c in zip(got, conv) if g != c[-1][1]][:args.show]
            for b in bad: print("   ", b)


def main() -> None:
    parser = argparse.ArgumentParser()
    sub = parser.add_subparsers(dest="command", required=True)
    t = sub.add_parser("train")
    t.add_argument("--out", type=Path, required=True)
    t.add_argument("--seed", type=int, default=0)
    t.add_argument("--minutes", type=float, default=45)
    t.add_argument("--threads", type=int, default=2)
    t.add_argument("--tokens", type=int, default=4096)
    t.add_argument("--lr", type=float, default=3e-3)
    t.add_argument("--muon", action="store_true")
    t.add_argument("--bf16", action="store_true")
    t.set_defaults(run=train)
    e = sub.add_parser("eval")
    e.add_argument("--model", type=Path, default=demo_path())
    e.add_argument("--seed", type=int, default=1)
    e.add_argument("--examples", type=int, default=50)
    e.add_argument("--threads", type=int, default=2)
    e.add_argument("--show", type=int, default=0)
    e.set_defaults(run=evaluate)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
