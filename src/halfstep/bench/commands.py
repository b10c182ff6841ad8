"""The words of `halfstep bench`: what there is to measure.

In: settings, checked. Out: the tables of the room that they lead to. Importing this
loads no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from halfstep.bench import flags
from halfstep.bench.flags import FORMS, OPTIMIZERS, PEERS, RULES, WIRES
from halfstep.train import dependencies

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from halfstep.reporting.table import Table


__all__ = ["BENCHES", "FORMS", "OPTIMIZERS", "PEERS", "RULES", "WIRES", "Bench"]


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


def _train(arguments: argparse.Namespace) -> list[Table]:
    dependencies.check("halfstep bench train", dependencies.TO_TRAIN)
    from halfstep.bench import train

    return train.tables(arguments)


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
    from halfstep.bench import scale_traces

    return scale_traces.tables(arguments)


def _recipe(arguments: argparse.Namespace) -> list[Table]:
    from halfstep.bench import recipe

    return recipe.tables(arguments)


def _optimizer(arguments: argparse.Namespace) -> list[Table]:
    from halfstep.bench import optimizer

    return optimizer.tables(arguments)


def _ner(arguments: argparse.Namespace) -> list[Table]:
    dependencies.check("halfstep bench ner", dependencies.TO_TRAIN)
    from halfstep.bench import ner

    return ner.tables(arguments)


def _quality(arguments: argparse.Namespace) -> list[Table]:
    dependencies.check("halfstep bench quality", dependencies.TO_TRAIN)
    from halfstep.bench import accuracy

    return accuracy.tables(arguments)


def _wire(arguments: argparse.Namespace) -> list[Table]:
    from halfstep.bench import comm_bytes

    return comm_bytes.tables(arguments)


def _add_probe(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `bench probe`: the encoder's, and two more."""
    flags.add_encoder(parser)
    text = "steps from one sample of statistics to the next (default 100)"
    parser.add_argument(
        "--every", type=flags.positive_int, default=100, metavar="N", help=text
    )
    parser.add_argument(
        "--loop",
        choices=("fp32", "torch.amp", "O1 torch", "O1 lean"),
        default="O1 lean",
        help="how it trains (default O1 lean)",
    )


def _probe(arguments: argparse.Namespace) -> list[Table]:
    from halfstep.bench import probe

    return probe.tables(arguments)


BENCHES = {
    "recipe": Bench(
        "torch's recipe network, beside torch.amp, Accelerate, Fabric and by hand",
        "Train a few large linear layers with every level and form of masters, and "
        "with what people use instead, a process each; print time, memory and loss.",
        flags.add_recipe,
        _recipe,
    ),
    "optimizer": Bench(
        "an update in each form of master weights, beside a copy of memory",
        "Time the update of weights in each form, as multiples of a copy that moves "
        "as many bytes, and count the bytes that a parameter takes.",
        flags.add_optimizer,
        _optimizer,
    ),
    "train": Bench(
        "the text classifier at each level, beside a plain torch.amp loop",
        "Train the same model on the same texts at each level and with the loop that "
        "most people write; print time, memory and quality.",
        flags.add_train,
        _train,
    ),
    "quality": Bench(
        "accuracy at each level and form of masters, beside fp32, over seeds",
        "Train the same classifier from the same seeds in fp32, at each level, and "
        "with each form of master weights; print quality with its intervals.",
        flags.add_quality,
        _quality,
    ),
    "ner": Bench(
        "entities found in fp32, and in mixed precision with and without loss scaling",
        "Train the same finder of entities from the same seeds in fp32, fp16 and bf16; "
        "print F1, precision, recall, memory and speed.",
        flags.add_ner,
        _ner,
    ),
    "autocast": Bench(
        "what one operation and one region cost, beside torch.autocast",
        "Time operations in a region of torch.autocast and in one of halfstep, under "
        "torch's own table and under rules, and the regions themselves.",
        flags.add_autocast,
        _autocast,
    ),
    "accumulate": Bench(
        "gradient accumulation, beside a plain torch.amp loop",
        "Train a few large linear layers, several micro-batches to a step; print time, "
        "memory, and how often weights are cast.",
        flags.add_accumulate,
        _accumulate,
    ),
    "encoder": Bench(
        "a BERT encoder in fp32, torch.amp and O1: time, memory, loss",
        "Train a BERT encoder from scratch on made-up texts, several seeds of each "
        "contender; print time, memory for activations, and losses.",
        flags.add_encoder,
        _encoder,
    ),
    "scaler": Bench(
        "what a GradScaler adds to a step, beside torch.amp's",
        "Time scaling, unscaling, the check and the move of the scale, by torch's "
        "GradScaler and by ours, in steps of several optimizers.",
        flags.add_scaler,
        _scaler,
    ),
    "probe": Bench(
        "what a probe adds to a step: flags, sampled and full statistics",
        "Train a BERT encoder from scratch on made-up texts without a probe, and with "
        "one in each mode, in turn; print what a step takes.",
        _add_probe,
        _probe,
    ),
    "wire": Bench(
        "bytes that two processes exchange in a step, at each level",
        "Train a few linear layers in two processes over loopback, at each level and "
        "with torch.amp; print the bytes their sockets sent, and the bytes of the "
        "tensors they all-reduced.",
        flags.add_wire,
        _wire,
    ),
    "traces": Bench(
        "steps lost to overflow under each library's rule for the scale",
        "Replay recorded and made-up sizes of gradients through the rules of "
        "torch.amp, Megatron, DeepSpeed and ours; print steps lost and final scales.",
        flags.add_traces,
        _traces,
    ),
}
"""Word on the command line -> what it measures."""
