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


def _is_whole(word: str) -> bool:
    return word.isascii() and word.isdigit() and int(word) > 0


def whole(word: str) -> int:
    """Return the number that a flag gives; argparse puts the flag before the message.

    Raises:
        argparse.ArgumentTypeError: If it is no whole number of at least 1.
    """
    if not _is_whole(word):
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


def shapes(words: str) -> list[str]:
    """Return shapes with commas between them, each a number of tensors x their size.

    Raises:
        argparse.ArgumentTypeError: If one is not two whole numbers and an x.
    """
    for word in words.split(","):
        parts = word.split("x")
        if not (len(parts) == 2 and all(_is_whole(part) for part in parts)):  # noqa: PLR2004
            message = f"{word!r} must be a number of tensors x a size, such as 3x4096"
            raise argparse.ArgumentTypeError(message)
    return words.split(",")


OPTIMIZERS = ("none", "sgd", "adamw", "sgd-fused", "adamw-fused")
"""What `bench scaler` can step; none does nothing."""


def optimizers(words: str) -> list[str]:
    """Return names of optimizers with commas between them; "all" are all.

    Raises:
        argparse.ArgumentTypeError: If one is unknown.
    """
    names = list(OPTIMIZERS) if words == "all" else words.split(",")
    for name in names:
        if name not in OPTIMIZERS:
            message = f"{name!r} must be all or of {', '.join(OPTIMIZERS)}"
            raise argparse.ArgumentTypeError(message)
    return names


def _add_common(parser: argparse.ArgumentParser, rounds: int | None) -> None:
    """Add the flags of most benches."""
    text = "(default bf16)"
    parser.add_argument("--dtype", choices=("bf16", "fp16"), default="bf16", help=text)
    _add_place(parser, rounds)


def _add_place(parser: argparse.ArgumentParser, rounds: int | None) -> None:
    """Add where to measure, and how often."""
    add = parser.add_argument
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


def _add_scaler_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--shapes",
        type=shapes,
        default=["1000x16", "3x4096"],
        metavar="NxM,NxM",
        help="N gradients of M x M (default 1000x16,3x4096)",
    )
    add(
        "--optimizer",
        type=optimizers,
        default=["none", "sgd", "adamw-fused"],
        metavar="NAME,NAME",
        help=f"all, or of {', '.join(OPTIMIZERS)} (default none,sgd,adamw-fused)",
    )
    text = "steps in one turn, fewer of slow ones (default 50)"
    add("--calls", type=whole, default=50, metavar="N", help=text)
    _add_place(parser, rounds=21)


def _add_traces_flags(parser: argparse.ArgumentParser) -> None:
    text = "steps of each trace (default 5000)"
    parser.add_argument("--steps", type=whole, default=5000, metavar="N", help=text)


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


def _scaler(arguments: argparse.Namespace) -> list[Table]:
    from halfstep.bench import scaler

    return scaler.tables(arguments)


def _traces(arguments: argparse.Namespace) -> list[Table]:
    from halfstep.bench import traces

    return traces.tables(arguments)


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
    "scaler": Bench(
        "what a GradScaler adds to a step, beside torch.amp's",
        "Time scaling, unscaling, the check and the move of the scale, by torch's "
        "GradScaler and by ours, in steps of several optimizers.",
        _add_scaler_flags,
        _scaler,
    ),
    "traces": Bench(
        "steps lost to overflow under each library's rule for the scale",
        "Replay recorded and made-up sizes of gradients through the rules of "
        "torch.amp, Megatron, DeepSpeed and ours; print steps lost and final scales.",
        _add_traces_flags,
        _traces,
    ),
}
"""Word on the command line -> what it measures."""
