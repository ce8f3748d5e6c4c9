"""Trains and measures the bundled demo model.

`demo_model.py train --out DIR --seed N` writes a checkpoint, `demo_model.py eval --model DIR`
measures one. Only the command line is here; the work is done in demo_training/.
"""

import argparse
import sys
from pathlib import Path

import torch

# From a checkout, pipeinfer need not be installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from demo_training.measuring import measure
from demo_training.training import Schedule, train
from pipeinfer.demo import demo_path


def parse_arguments() -> argparse.Namespace:
    """Read the command line; exits with 2 on wrong usage."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: 2)")
    commands = parser.add_subparsers(dest="command", required=True)
    training = commands.add_parser("train", help="train a fresh model")
    training.add_argument("--out", type=Path, required=True, help="the folder to write")
    training.add_argument("--seed", type=int, default=0)
    training.add_argument("--steps", type=int, default=5000)
    training.add_argument("--minutes", type=float, default=60, help="the longest to train")
    training.add_argument("--start", type=Path, help="a checkpoint to go on from")
    training.add_argument("--tokens-per-step", type=int, default=4096)
    training.add_argument("--rate", type=float, default=4e-3, help="the highest learning rate")
    measuring = commands.add_parser("eval", help="measure a checkpoint on fresh examples")
    measuring.add_argument("--model", type=Path, default=demo_path())
    measuring.add_argument("--seed", type=int, default=1)
    measuring.add_argument("--examples", type=int, default=100, help="examples per task")
    measuring.add_argument("--show", type=int, default=0, help="wrong answers to print per task")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    if args.command == "train":
        schedule = Schedule(args.steps, 60 * args.minutes, args.tokens_per_step, args.rate)
        train(schedule, args.out, args.seed, args.start)
    else:
        measure(args.model, args.examples, args.seed, args.show)


if __name__ == "__main__":
    main()
