"""The benches of `halfstep bench`: descriptions and flags.

Importing this loads no torch.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from halfstep.bench import contenders
from halfstep.train import dependencies

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from halfstep.reporting.table import Table

Flags = dict[str, dict[str, Any]]
"""Name of a flag -> arguments of `add_argument`."""

# Readers of flag values; argparse prints the flag's name before their messages.


def _is_positive_int(text: str) -> bool:
    return text.isascii() and text.isdigit() and int(text) > 0


def _is_rate(text: str) -> bool:
    try:
        return 0 < float(text) < math.inf
    except ValueError:
        return False


def _check(valid: object, text: str, expected: str) -> None:
    if not valid:
        message = f"{text!r} {expected}"
        raise argparse.ArgumentTypeError(message)


def positive_int(text: str) -> int:
    """Parse a whole number of at least 1."""
    _check(_is_positive_int(text), text, "must be a whole number of at least 1")
    return int(text)


def positive_ints(text: str) -> list[int]:
    """Parse comma-separated whole numbers of at least 1."""
    return [positive_int(part) for part in text.split(",")]


def share(text: str) -> float:
    """Parse a number from 0 to below 1."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    _check(0 <= value < 1, text, "must be a number from 0 to below 1")
    return value


def shapes(text: str) -> list[str]:
    """Check comma-separated shapes, each COUNTxSIZE."""
    for part in text.split(","):
        count, _, size = part.partition("x")
        _check(
            _is_positive_int(count) and _is_positive_int(size),
            part,
            "must be a number of tensors x a size, such as 3x4096",
        )
    return text.split(",")


def name_list(choices: Collection[str]) -> Callable[[str], list[str]]:
    """Return a parser of comma-separated names; "all" means all of them."""

    def read(text: str) -> list[str]:
        names = list(choices) if text == "all" else text.split(",")
        for name in names:
            _check(name in choices, name, f"must be all or of {', '.join(choices)}")
            _check(names.count(name) == 1, name, "must stand there once")
        return names

    return read


def learning_rates(choices: Collection[str]) -> Callable[[str], list[str]]:
    """Return a parser of comma-separated learning rates: a number or NAME=number."""
    expected = (
        f"must be a number above 0, or NAME=number with a name of {', '.join(choices)}"
    )

    def read(text: str) -> list[str]:
        names: list[str] = []
        for part in text.split(","):
            name, _, rate = part.rpartition("=")
            _check(_is_rate(rate) and (not name or name in choices), part, expected)
            _check(
                name not in names, part, f"is the second rate of {name or 'all others'}"
            )
            names.append(name)
        return text.split(",")

    return read


# Flags shared by several benches


def _flag(
    text: str,
    default: Any = None,  # noqa: ANN401 -- what the reader returns
    read: Callable[[str], Any] = positive_int,
    metavar: str = "N",
) -> dict[str, Any]:
    """Return a flag; its help ends with the default, if any."""
    if default is not None:
        default_text = (
            ",".join(map(str, default)) if isinstance(default, list) else default
        )
        text = f"{text} (default {default_text})".lstrip()
    return {"type": read, "default": default, "metavar": metavar, "help": text}


def _choice(text: str, *choices: str, default: str | None = None) -> dict[str, Any]:
    """Return a flag with fixed choices; the first is the default."""
    default = default or choices[0]
    text = f"{text} (default {default})"
    return {"choices": choices, "default": default, "help": text}


def _names(choices: Collection[str], *default: str) -> dict[str, Any]:
    text = f"of {', '.join(choices)}"
    if default:
        return _flag(f"all, or {text}", [*default], name_list(choices), "NAME,NAME")
    flag = _flag(f"{text} (default all)", None, name_list(choices), "NAME,NAME")
    return flag | {"default": [*choices]}


def _data(what: str) -> Flags:
    return {
        "data": _flag(f"{what} to train on (default built-in)", None, str, "PATH"),
        "limit": _flag("first N rows only"),
    }


def _network(width: int, batch: int) -> Flags:
    return {
        "layers": _flag("linear layers, with ReLU between", 3),
        "width": _flag("inputs and outputs of each layer", width),
        "batch": _flag("examples of one micro-batch", batch),
    }


_DEVICE = {"choices": ("cpu", "cuda"), "help": "(default cuda if there is one)"}
_DTYPE = _choice("16-bit format", "bf16", "fp16")
_PLACE: Flags = {"dtype": _DTYPE, "device": _DEVICE}
_ROUNDS = "rounds: in each, every contender is measured once"
_RUNS = "runs of each contender"
_MICRO_BATCHES = "micro-batches of one step"
_MODELS = "tiny, small, or a name that transformers loads"
_MODEL: Flags = {
    "model": _flag(_MODELS, "tiny", str, "NAME"),
    "epochs": _flag("passes over the data (default as halfstep train)"),
}
_ENCODER: Flags = {
    "layers": _flag("layers (default 4; 12 on cuda)"),
    "hidden": _flag("width of the residual stream (default 256; 768 on cuda)"),
    "heads": _flag("attention heads (default 4; 12 on cuda)"),
    "batch": _flag("texts of a step (default 16; 32 on cuda)"),
    "length": _flag("tokens of a text", 128),
    "steps": _flag("steps of each run", 150),
    "seeds": _flag(_RUNS, 3),
    "dropout": _flag("dropout everywhere", 0.1, share, "P"),
    "lr": _flag(
        "learning rate of AdamW (default 0.0003; 0.0001 on cuda)", None, share, "X"
    ),
    "attention": _choice("eager: softmax is an operation of its own", "eager", "sdpa"),
    **_PLACE,
}


@dataclass(frozen=True)
class Bench:
    """One benchmark."""

    function: str
    """MODULE.FUNCTION in this package: takes the settings, returns tables."""
    summary: str
    """One line for the list of benches."""
    description: str
    """What is compared."""
    flags: Flags
    epilog: str | None = None

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        """Add this bench's flags to a parser."""
        parser.epilog = self.epilog
        for name, settings in self.flags.items():
            parser.add_argument(f"--{name}", **settings)

    def tables(self, arguments: argparse.Namespace) -> list[Table]:
        """Run the bench; return its tables.

        Raises:
            UserError: If a setting, the data or the machine cannot be used, or a
                contender's process fails.
        """
        module, _, function = self.function.partition(".")
        if module in {"train", "accuracy", "plan"}:
            dependencies.check(f"halfstep bench {function}", dependencies.TO_TRAIN)
        measured = getattr(import_module(f"halfstep.bench.{module}"), function)
        tables: list[Table] = measured(arguments)
        return tables


_RECIPE_LINES = (f"  {n:<16}{c.description}" for n, c in contenders.RECIPE.items())

BENCHES = {
    "recipe": Bench(
        "training_step.recipe",
        "large linear layers: all levels, torch.amp, Accelerate, Fabric, by hand",
        "Train a few large linear layers (torch's AMP recipe) at every level, with "
        "every form of master weights, and with other libraries, each in its own "
        "process; print time, memory and loss.",
        {
            **_network(4096, 512),
            "accumulate": _flag(_MICRO_BATCHES, 1),
            "optimizer": _choice(
                "what updates the weights", "sgd", "sgd-momentum", "adamw"
            ),
            "steps": _flag("steps of a contender in a round", 3),
            "contenders": _names(contenders.RECIPE),
            **_PLACE,
            "rounds": _flag(_ROUNDS, 9),
        },
        "\n".join(["contenders:", *_RECIPE_LINES]),
    ),
    "optimizer": Bench(
        "optimizer_step.optimizer",
        "an optimizer update with each form of master weights",
        "Time the optimizer update with each form of master weights, as a multiple of "
        "a copy that moves as many bytes, and count the bytes per parameter.",
        {
            "layers": _flag("weights", 3),
            "width": _flag("rows and columns of each weight", 4096),
            "optimizer": _names(
                contenders.UPDATE_RULES, "sgd", "sgd-momentum", "adamw"
            ),
            "forms": _names(contenders.FORMS),
            **_PLACE,
            "rounds": _flag(_ROUNDS, 15),
        },
    ),
    "train": Bench(
        "train.train",
        "the text classifier at each level, against a plain torch.amp loop",
        "Train the same model on the same texts at each level and with a plain "
        "torch.amp loop; print time, memory and quality.",
        {
            **_data("texts"),
            "seed": _flag("seed", 123, int),
            "epochs": _flag("passes over the data", 1),
            "model": _flag(_MODELS, "tiny", str, "NAME"),
            "repeats": _flag(_RUNS, 1),
            "contenders": _names(contenders.TRAIN),
        },
    ),
    "quality": Bench(
        "accuracy.quality",
        "accuracy at each level and form of master weights, over seeds",
        "Train the same classifier from the same seeds in fp32, at each level, and "
        "with each form of master weights; print quality with confidence intervals.",
        {
            **_data("texts"),
            "share": _flag("share of a single file for evaluation", 0.2, share, "P"),
            **_MODEL,
            "seeds": _flag(_RUNS, 5),
            "contenders": _names(contenders.QUALITY),
            "device": _DEVICE,
        },
    ),
    "ner": Bench(
        "accuracy.ner",
        "entity recognition in fp32 and 16 bits, with and without loss scaling",
        "Train the same entity tagger from the same seeds in fp32, fp16 and bf16; "
        "print F1, precision, recall, memory and speed.",
        {
            **_data("entities"),
            **_MODEL,
            "batch-size": _flag("texts of one step", 32),
            "lr": _flag(
                "learning rate of all contenders, and of single ones, such as "
                "1e-3,O1-fp16=5e-4 (default as halfstep train)",
                None,
                learning_rates(contenders.NER),
                "X,NAME=X",
            ),
            "mask-tokens": _flag(
                "share of tokens masked (default as halfstep train)", None, float, "P"
            ),
            "max-length": _flag("tokens after which a text is cut", 192),
            "seeds": _flag(_RUNS, 3),
            "contenders": _names(contenders.NER),
            "device": _DEVICE,
        },
    ),
    "autocast": Bench(
        "autocast.tables",
        "overhead of one operation and one autocast context",
        "Time operations under torch.autocast and under halfstep.autocast, with "
        "torch's own table and with rules, and the autocast contexts themselves.",
        {
            "sizes": _flag(
                "rows and columns of the operands", [8, 512], positive_ints, "N,N"
            ),
            "calls": _flag("calls in a round, fewer of slow ones", 2000),
            "threads": _flag("threads inside an operation on a CPU", 1),
            **_PLACE,
            "rounds": _flag(_ROUNDS, 21),
        },
    ),
    "plan": Bench(
        "plan.tables",
        "planned models against torch.autocast: casts, time, predicted time",
        "Train five models under torch.autocast, under the lean policy, and as planned "
        "by painting and by the minimum cut; print casts, times and predicted times.",
        {
            "models": _names(contenders.PLANNED),
            **_PLACE,
            "rounds": _flag(_ROUNDS, 9),
        },
    ),
    "accumulate": Bench(
        "training_step.accumulate",
        "gradient accumulation, against a plain torch.amp loop",
        "Train a few large linear layers with several micro-batches per step; print "
        "time, memory, and how often weights are cast.",
        {
            **_network(4096, 512),
            "accumulate": _flag(_MICRO_BATCHES, 8),
            **_PLACE,
            "rounds": _flag(_ROUNDS, 9),
        },
    ),
    "encoder": Bench(
        "encoder.tables",
        "a BERT encoder in fp32, torch.amp and O1: time, memory, loss",
        "Train a BERT encoder from scratch on synthetic texts, several seeds of each "
        "contender; print time, memory for activations, and losses.",
        _ENCODER,
    ),
    "scaler": Bench(
        "scaler.tables",
        "overhead of a GradScaler in a step, against torch.amp's",
        "Time scaling, unscaling, the inf check and the update of the loss scale with "
        "torch's GradScaler and with halfstep's, for several optimizers.",
        {
            "shapes": _flag(
                "N gradients of M x M", ["1000x16", "3x4096"], shapes, "NxM,NxM"
            ),
            "optimizer": _names(
                contenders.SCALER_OPTIMIZERS, "none", "sgd", "adamw-fused"
            ),
            "calls": _flag("steps in a round, fewer of slow ones", 50),
            "device": _DEVICE,
            "rounds": _flag(_ROUNDS, 21),
        },
    ),
    "probe": Bench(
        "encoder.probe_tables",
        "overhead of a probe in a step: flags, sampled and full statistics",
        "Train a BERT encoder from scratch on synthetic texts without a probe, and "
        "with one in each mode, in turn; print the time of a step.",
        {
            **_ENCODER,
            "every": _flag("steps from one sample of statistics to the next", 100),
            "loop": _choice("training loop", *contenders.ENCODER, default="O1 lean"),
        },
    ),
    "wire": Bench(
        "comm_bytes.tables",
        "bytes that two processes exchange in a step, at each level",
        "Train a few linear layers in two processes over loopback, at each level and "
        "with torch.amp; print the bytes their sockets sent, and the bytes of the "
        "tensors they all-reduced.",
        {
            **_network(1024, 32),
            "accumulate": _flag(_MICRO_BATCHES, [1, 4], positive_ints, "N,N"),
            "steps": _flag("steps counted", 5),
            "contenders": _names(contenders.WIRE),
            "dtype": _DTYPE,
            "device": _choice("gloo runs on a CPU", "cpu"),
        },
    ),
    "traces": Bench(
        "scale_traces.tables",
        "steps skipped under each library's loss scale rule",
        "Replay recorded and synthetic gradient maxima through the rules of "
        "torch.amp, Megatron, DeepSpeed and halfstep; print skipped steps and scales.",
        {"steps": _flag("steps of each trace", 5000)},
    ),
}
"""Name on the command line -> bench."""
