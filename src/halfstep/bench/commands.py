"""The words of `halfstep bench`: what there is to measure, and the flags of each.

In: the command line. Out: settings, checked, and the tables of the room that they
lead to. Importing this loads no torch.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING

from halfstep.bench import train

if TYPE_CHECKING:
    from collections.abc import Callable

    from halfstep.report import Table


@dataclass(frozen=True)
class Bench:
    """One thing to measure."""

    summary: str
    """One line, for the list of benches."""
    description: str
    """What is compared with what."""
    add_flags: Callable[[argparse.ArgumentParser], None]
    """Gives a parser the flags of this bench."""
    tables: Callable[[argparse.Namespace], list[Table]]
    """Measures, and returns what to print."""


def whole(word: str) -> int:
    """Return the number that a flag gives; argparse puts the flag before the message.

    Raises:
        argparse.ArgumentTypeError: If it is no whole number of at least 1.
    """
    if not (word.isascii() and word.isdigit() and int(word) > 0):
        message = f"{word!r} must be a whole number of at least 1"
        raise argparse.ArgumentTypeError(message)
    return int(word)


def wholes(words: str) -> list[int]:
    """Return numbers with commas between them, each as `whole` reads it."""
    return [whole(word) for word in words.split(",")]


def share(word: str) -> float:
    """Return a number from 0 to below 1.

    Raises:
        argparse.ArgumentTypeError: If it is none.
    """
    try:
        value = float(word)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        message = f"{word!r} must be a number from 0 to below 1"
        raise argparse.ArgumentTypeError(message)
    return value


def _add_common(parser: argparse.ArgumentParser, rounds: int | None) -> None:
    """Add the flags of every bench but `train`."""
    add = parser.add_argument
    add("--dtype", choices=("bf16", "fp16"), default="bf16", help="(default bf16)")
    add("--device", choices=("cpu", "cuda"), help="(default cuda if there is one)")
    if rounds:
        text = f"turns of each contender (default {rounds})"
        add("--rounds", type=whole, default=rounds, metavar="N", help=text)


def _add_autocast_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--sizes",
        type=wholes,
        default=[8, 512],
        metavar="N,N",
        help="rows and columns of the operands (default 8,512)",
    )
    add(
        "--calls",
        type=whole,
        default=2000,
        metavar="N",
        help="calls in one turn, fewer of slow ones (default 2000)",
    )
    text = (
        "threads inside an operation on a CPU (default 1: another would be waited for)"
    )
    add("--threads", type=whole, default=1, metavar="N", help=text)
    _add_common(parser, rounds=21)


def _add_accumulate_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--layers", type=whole, default=3, metavar="N", help="(default 3)")
    text = "inputs and outputs of each layer (default 4096)"
    add("--width", type=whole, default=4096, metavar="N", help=text)
    text = "examples of one micro-batch (default 512)"
    add("--batch", type=whole, default=512, metavar="N", help=text)
    text = "micro-batches of one step (default 8)"
    add("--accumulate", type=whole, default=8, metavar="N", help=text)
    _add_common(parser, rounds=9)


def _add_encoder_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    for name, text in {
        "layers": "layers (default 4; 12 on cuda)",
        "hidden": "width of the residual stream (default 256; 768 on cuda)",
        "heads": "attention heads (default 4; 12 on cuda)",
        "batch": "texts of a step (default 16; 32 on cuda)",
    }.items():
        add(f"--{name}", type=whole, metavar="N", help=text)
    text = "tokens of a text (default 128)"
    add("--length", type=whole, default=128, metavar="N", help=text)
    text = "steps of each run (default 150)"
    add("--steps", type=whole, default=150, metavar="N", help=text)
    text = "runs of each contender (default 3)"
    add("--seeds", type=whole, default=3, metavar="N", help=text)
    text = "dropout everywhere (default 0.1)"
    add("--dropout", type=share, default=0.1, metavar="P", help=text)
    text = "learning rate of AdamW (default 0.0003; 0.0001 on cuda)"
    add("--lr", type=share, metavar="X", help=text)
    add(
        "--attention",
        choices=("eager", "sdpa"),
        default="eager",
        help="eager: softmax is an operation of its own (default eager)",
    )
    _add_common(parser, rounds=None)


def _train(arguments: argparse.Namespace) -> list[Table]:
    return [train.bench(arguments)]


def _autocast(arguments: argparse.Namespace) -> list[Table]:
    from halfstep.bench import autocast

    return autocast.tables(arguments)


def _accumulate(arguments: argparse.Namespace) -> list[Table]:
    from halfstep.bench import accumulate

    return accumulate.tables(arguments)


def _encoder(arguments: argparse.Namespace) -> list[Table]:
    from halfstep.bench import encoder

    return encoder.tables(arguments)


BENCHES = {
    "train": Bench(
        "the text classifier at each level, beside a plain torch.amp loop",
        "Train the same model on the same texts at each level and with the loop that "
        "most people write; print time, memory and quality.",
        train.add_flags,
        _train,
    ),
    "autocast": Bench(
        "what one operation and one region cost, beside torch.autocast",
        "Time operations in a region of torch.autocast and in one of halfstep, under "
        "torch's own table and under rules, and the regions themselves.",
        _add_autocast_flags,
        _autocast,
    ),
    "accumulate": Bench(
        "gradient accumulation, beside a plain torch.amp loop",
        "Train a few large linear layers, several micro-batches to a step; print time, "
        "memory, and how often weights are cast.",
        _add_accumulate_flags,
        _accumulate,
    ),
    "encoder": Bench(
        "a BERT encoder in fp32, torch.amp and O1: time, memory, loss",
        "Train a BERT encoder from scratch on made-up texts, several seeds of each "
        "contender; print time, memory for activations, and losses.",
        _add_encoder_flags,
        _encoder,
    ),
}
"""Word on the command line -> what it measures."""
