"""The flags of each bench, and what reads them.

In: parsers of argparse. Out: the same, with flags. Importing this loads no torch.
"""

from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


"""Columns of a help text that argparse does not wrap."""


def _is_positive_int(word: str) -> bool:
    return word.isascii() and word.isdigit() and int(word) > 0


def positive_int(word: str) -> int:
    """Return the number that a flag gives; argparse puts the flag before the message.

    Raises:
        argparse.ArgumentTypeError: If it is no whole number of at least 1.
    """
    if not _is_positive_int(word):
        message = f"{word!r} must be a whole number of at least 1"
        raise argparse.ArgumentTypeError(message)
    return int(word)


def positive_ints(words: str) -> list[int]:
    """Return numbers with commas between them, each as `positive_int` reads it."""
    return [positive_int(word) for word in words.split(",")]


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


def learning_rates(choices: Sequence[str]) -> Callable[[str], list[str]]:
    """Return what reads learning rates, each a number or NAME=number.

    Args:
        choices: The names that are accepted.
    """

    def read(words: str) -> list[str]:
        seen = set()
        for word in words.split(","):
            name, _, number = word.rpartition("=")
            if not _is_rate(number) or (name and name not in choices):
                message = (
                    f"{word!r} must be a number above 0, or NAME=number with a name of "
                    f"{', '.join(choices)}"
                )
                raise argparse.ArgumentTypeError(message)
            if name in seen:
                message = f"{word!r} is the second rate of {name or 'all others'}"
                raise argparse.ArgumentTypeError(message)
            seen.add(name)
        return words.split(",")

    return read


def _is_rate(word: str) -> bool:
    try:
        return 0 < float(word) < math.inf
    except ValueError:
        return False


def shapes(words: str) -> list[str]:
    """Return shapes with commas between them, each a number of tensors x their size.

    Raises:
        argparse.ArgumentTypeError: If one is not two whole numbers and an x.
    """
    for word in words.split(","):
        parts = word.split("x")
        if not (len(parts) == 2 and all(_is_positive_int(part) for part in parts)):  # noqa: PLR2004
            message = f"{word!r} must be a number of tensors x a size, such as 3x4096"
            raise argparse.ArgumentTypeError(message)
    return words.split(",")


OPTIMIZERS = ("none", "sgd", "adamw", "sgd-fused", "adamw-fused")
"""What `bench scaler` can step; none does nothing."""

RULES = ("sgd", "sgd-momentum", "adam", "adamw")
"""What `bench optimizer` can update with."""

FORMS = (
    "fp32",
    "split",
    "split-released",
    "kahan",
    "stochastic",
    "none",
    "torch-foreach",
    "torch-fused",
)
"""How `bench optimizer` can keep weights."""

_PEERS = {
    "fp32": "weights, gradients and products in fp32",
    "torch.amp": "torch.autocast, and torch's GradScaler with fp16",
    "torch.amp-kept": "the same; the C library's allocator keeps all memory",
    "accelerate": "Hugging Face Accelerate, mixed_precision as --dtype",
    "fabric-mixed": "Lightning Fabric, 16-bit products of fp32 weights",
    "fabric-true": "Lightning Fabric, 16-bit weights without masters",
    "naive-O2": "16-bit weights and fp32 masters by hand, copied each step",
    "pure": "16-bit weights by hand: no masters, no loss scale",
    "O1": "halfstep: fp32 weights, operations cast one by one",
    "O2": "halfstep: 16-bit weights, fp32 masters",
    "O2-kept": "the same; the C library's allocator keeps all memory",
    "O2-split": "halfstep: bf16 weights and the 16 bits they lack of fp32",
    "O2-kahan": "halfstep: bf16 weights and a bf16 rest of each update",
    "O2-stochastic": "halfstep: 16-bit weights, updates rounded at random",
    "O3": "halfstep: 16-bit weights without masters",
}
"""Contender of `bench recipe` -> what it is."""

PEERS = tuple(_PEERS)
"""What `bench recipe` can train with."""


TRAINS = (
    *("plain-fp32", "plain-amp", "O0", "O1-bf16", "O2-bf16", "O3-bf16"),
    *("O1-fp16", "O2-fp16"),
)
"""What `bench train` can train with."""

QUALITIES = (
    "fp32",
    "O1",
    "O2",
    "O2-split",
    "O2-kahan",
    "O2-stochastic",
    "O2-none",
    "O3",
)
"""What `bench quality` can train with."""

NERS = ("fp32", "O1-fp16-unscaled", "O1-fp16", "O1-bf16", "O2-bf16")
"""What `bench ner` can train with."""

WIRES = ("O0", "O1", "O2", "O2-split", "torch.amp", "torch.amp-hook")
"""What `bench wire` can train with."""


def name_list(choices: Sequence[str]) -> Callable[[str], list[str]]:
    """Return what reads names with commas between them; "all" are all.

    It raises `argparse.ArgumentTypeError` if a name is unknown, or stands there twice.
    """

    def read(words: str) -> list[str]:
        names = list(choices) if words == "all" else words.split(",")
        for name in names:
            if name not in choices:
                message = f"{name!r} must be all or of {', '.join(choices)}"
                raise argparse.ArgumentTypeError(message)
            if names.count(name) > 1:
                message = f"{name!r} must stand there once"
                raise argparse.ArgumentTypeError(message)
        return names

    return read


def _add_common(parser: argparse.ArgumentParser, rounds: int | None) -> None:
    """Add the flags of most benches."""
    text = "16-bit format (default bf16)"
    parser.add_argument("--dtype", choices=("bf16", "fp16"), default="bf16", help=text)
    _add_place(parser, rounds)


def _add_place(parser: argparse.ArgumentParser, rounds: int | None) -> None:
    """Add where to measure, and how often."""
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), help="(default cuda if there is one)")
    if rounds:
        text = f"turns of each contender (default {rounds})"
        add("--rounds", type=positive_int, default=rounds, metavar="N", help=text)


def _add_contenders(parser: argparse.ArgumentParser, choices: Sequence[str]) -> None:
    """Add which of them run."""
    parser.add_argument(
        "--contenders",
        type=name_list(choices),
        default=list(choices),
        metavar="NAME,NAME",
        help=f"of {', '.join(choices)} (default all)",
    )


def add_autocast(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `bench autocast`."""
    add = parser.add_argument
    add(
        "--sizes",
        type=positive_ints,
        default=[8, 512],
        metavar="N,N",
        help="rows and columns of the operands (default 8,512)",
    )
    add(
        "--calls",
        type=positive_int,
        default=2000,
        metavar="N",
        help="calls in one turn, fewer of slow ones (default 2000)",
    )
    text = (
        "threads inside an operation on a CPU (default 1: another would be waited for)"
    )
    add("--threads", type=positive_int, default=1, metavar="N", help=text)
    _add_common(parser, rounds=21)


def _add_network(parser: argparse.ArgumentParser, accumulate: int) -> None:
    """Add the sizes of the recipe's network, and of its micro-batches."""
    add = parser.add_argument
    text = "linear layers, with ReLU between (default 3)"
    add("--layers", type=positive_int, default=3, metavar="N", help=text)
    text = "inputs and outputs of each layer (default 4096)"
    add("--width", type=positive_int, default=4096, metavar="N", help=text)
    text = "examples of one micro-batch (default 512)"
    add("--batch", type=positive_int, default=512, metavar="N", help=text)
    text = f"micro-batches of one step (default {accumulate})"
    add("--accumulate", type=positive_int, default=accumulate, metavar="N", help=text)


def add_accumulate(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `bench accumulate`."""
    _add_network(parser, accumulate=8)
    _add_common(parser, rounds=9)


def add_encoder(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `bench encoder`."""
    add = parser.add_argument
    for name, text in {
        "layers": "layers (default 4; 12 on cuda)",
        "hidden": "width of the residual stream (default 256; 768 on cuda)",
        "heads": "attention heads (default 4; 12 on cuda)",
        "batch": "texts of a step (default 16; 32 on cuda)",
    }.items():
        add(f"--{name}", type=positive_int, metavar="N", help=text)
    text = "tokens of a text (default 128)"
    add("--length", type=positive_int, default=128, metavar="N", help=text)
    text = "steps of each run (default 150)"
    add("--steps", type=positive_int, default=150, metavar="N", help=text)
    text = "runs of each contender (default 3)"
    add("--seeds", type=positive_int, default=3, metavar="N", help=text)
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


def add_scaler(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `bench scaler`."""
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
        type=name_list(OPTIMIZERS),
        default=["none", "sgd", "adamw-fused"],
        metavar="NAME,NAME",
        help=f"all, or of {', '.join(OPTIMIZERS)} (default none,sgd,adamw-fused)",
    )
    text = "steps in one turn, fewer of slow ones (default 50)"
    add("--calls", type=positive_int, default=50, metavar="N", help=text)
    _add_place(parser, rounds=21)


def add_recipe(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `bench recipe`, and what its contenders are."""
    lines = [f"  {name:<16}{text}" for name, text in _PEERS.items()]
    parser.epilog = "\n".join(["contenders:", *lines])
    _add_network(parser, accumulate=1)
    add = parser.add_argument
    text = "what updates the weights (default sgd)"
    choices = ("sgd", "sgd-momentum", "adamw")
    add("--optimizer", choices=choices, default="sgd", help=text)
    text = "steps in one turn (default 3)"
    add("--steps", type=positive_int, default=3, metavar="N", help=text)
    _add_contenders(parser, PEERS)
    _add_common(parser, rounds=9)


def add_optimizer(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `bench optimizer`."""
    add = parser.add_argument
    add(
        "--layers",
        type=positive_int,
        default=3,
        metavar="N",
        help="weights (default 3)",
    )
    text = "rows and columns of each weight (default 4096)"
    add("--width", type=positive_int, default=4096, metavar="N", help=text)
    add(
        "--optimizer",
        type=name_list(RULES),
        default=["sgd", "sgd-momentum", "adamw"],
        metavar="NAME,NAME",
        help=f"all, or of {', '.join(RULES)} (default sgd,sgd-momentum,adamw)",
    )
    add(
        "--forms",
        type=name_list(FORMS),
        default=list(FORMS),
        metavar="NAME,NAME",
        help=f"of {', '.join(FORMS)} (default all)",
    )
    _add_common(parser, rounds=15)


def add_train(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `bench train`."""
    add = parser.add_argument
    add("--data", metavar="PATH", help="texts to train on (default built-in)")
    add("--limit", type=positive_int, metavar="N", help="first N rows only")
    add("--seed", type=int, default=123, metavar="N", help="(default 123)")
    add("--epochs", type=positive_int, default=1, metavar="N", help="(default 1)")
    text = "tiny, small, or what transformers loads (default tiny)"
    add("--model", default="tiny", metavar="NAME", help=text)
    add(
        "--repeats",
        type=positive_int,
        default=1,
        metavar="N",
        help="runs each (default 1)",
    )
    _add_contenders(parser, TRAINS)


def add_quality(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `bench quality`."""
    add = parser.add_argument
    add("--data", metavar="PATH", help="texts to train on (default built-in)")
    add("--limit", type=positive_int, metavar="N", help="first N rows only")
    text = "share of a single file kept to judge by (default 0.2)"
    add("--share", type=share, default=0.2, metavar="P", help=text)
    add("--model", default="tiny", metavar="NAME", help="(default tiny)")
    text = "passes over the data (default as halfstep train)"
    add("--epochs", type=positive_int, metavar="N", help=text)
    text = "runs of each contender (default 5)"
    add("--seeds", type=positive_int, default=5, metavar="N", help=text)
    _add_contenders(parser, QUALITIES)
    _add_place(parser, rounds=None)


def add_ner(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `bench ner`."""
    add = parser.add_argument
    add("--data", metavar="PATH", help="entities to train on (default built-in)")
    add("--limit", type=positive_int, metavar="N", help="first N rows only")
    add("--model", default="tiny", metavar="NAME", help="(default tiny)")
    text = "passes over the data (default as halfstep train)"
    add("--epochs", type=positive_int, metavar="N", help=text)
    add("--batch-size", type=positive_int, default=32, metavar="N", help="(default 32)")
    add(
        "--lr",
        type=learning_rates(NERS),
        metavar="X,NAME=X",
        help="learning rate of all contenders, and of single ones, such as "
        "1e-3,O1-fp16=5e-4 (default as halfstep train)",
    )
    text = "share of tokens hidden (default as halfstep train)"
    add("--mask-tokens", type=float, metavar="P", help=text)
    text = "tokens after which a text is cut (default 192)"
    add("--max-length", type=positive_int, default=192, metavar="N", help=text)
    text = "runs of each contender (default 3)"
    add("--seeds", type=positive_int, default=3, metavar="N", help=text)
    _add_contenders(parser, NERS)
    _add_place(parser, rounds=None)


def add_traces(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `bench traces`."""
    text = "steps of each trace (default 5000)"
    parser.add_argument(
        "--steps", type=positive_int, default=5000, metavar="N", help=text
    )


def add_wire(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `bench wire`."""
    add = parser.add_argument
    text = "linear layers, with ReLU between (default 3)"
    add("--layers", type=positive_int, default=3, metavar="N", help=text)
    text = "inputs and outputs of each layer (default 1024)"
    add("--width", type=positive_int, default=1024, metavar="N", help=text)
    text = "examples of one micro-batch (default 32)"
    add("--batch", type=positive_int, default=32, metavar="N", help=text)
    text = "micro-batches of one step (default 1,4)"
    add("--accumulate", type=positive_ints, default=[1, 4], metavar="N,N", help=text)
    text = "steps counted (default 5)"
    add("--steps", type=positive_int, default=5, metavar="N", help=text)
    _add_contenders(parser, WIRES)
    text = "16-bit format (default bf16)"
    add("--dtype", choices=("bf16", "fp16"), default="bf16", help=text)
    text = "gloo is a CPU's (default cpu)"
    add("--device", choices=("cpu",), default="cpu", help=text)
