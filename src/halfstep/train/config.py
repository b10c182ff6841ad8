"""The settings of a training run: one dataclass, which is also the flags.

In: words from the command line. Out: a `TrainConfig`, checked; and the same as plain
values for `config.json`. The help of each flag is the text of its field.
"""

from __future__ import annotations

import argparse
import difflib
from dataclasses import MISSING, Field, asdict, dataclass, field, fields
from math import inf
from typing import Any

from halfstep.errors import UserError
from halfstep.master import form as forms
from halfstep.policy import Policy

_TYPES = {"str": str, "int": int, "float": float}
_MOST_SEED = 2**32  # torch takes 64 bits, and each step's own seed is a multiple


def _flag(default: object, text: str, group: str, metavar: str = "") -> Any:  # noqa: ANN401
    return field(
        default=default, metadata={"help": text, "group": group, "metavar": metavar}
    )


@dataclass(frozen=True)
class TrainConfig:
    """What a run is made of; `None` means: chosen from the data and the model."""

    data: str | None = _flag(
        None,
        "file of texts and labels (.json, .jsonl, .csv, .tsv), or a folder with "
        "train.*, dev.* and test.*; default the built-in emotions",
        "data",
        "PATH",
    )
    labels: str | None = _flag(
        None, "names of the labels in order of their ids, with commas", "data", "A,B,C"
    )
    limit: int | None = _flag(None, "use the first N rows only", "data", "N")
    dev_share: float = _flag(
        0.08, "share of a single file kept for evaluation (default 0.08)", "data", "P"
    )
    max_length: int = _flag(
        128, "tokens after which a text is cut (default 128)", "data", "N"
    )
    model: str = _flag(
        "tiny",
        "tiny (4 layers x 256), small (6 x 384), both from scratch with a vocabulary "
        "of the training text's characters; or a folder or hub name to fine-tune "
        "(default tiny)",
        "model",
        "NAME",
    )
    dropout: float | None = _flag(
        None, "dropout (default 0.1, or the fine-tuned model's own)", "model", "P"
    )
    mask_tokens: float | None = _flag(
        None,
        "share of training tokens hidden at random, against learning by heart "
        "(default 0.3 from scratch, 0 when fine-tuning)",
        "model",
        "P",
    )
    level: str = _flag(
        "auto",
        "O0 to O3, see `halfstep levels`; auto measures this machine (default auto)",
        "precision",
        "L",
    )
    dtype: str = _flag("auto", "bf16, fp16 or auto (default auto)", "precision", "D")
    loss_scale: str = _flag(
        "auto",
        "dynamic, measured, logmax, none or a number; auto is dynamic for fp16, none "
        "otherwise (default auto)",
        "precision",
        "S",
    )
    master: str = _flag(
        forms.FP32.name,
        "what is kept beside each 16-bit weight at O2: fp32, split, kahan, stochastic "
        "or none; split, kahan and stochastic need bf16 (default fp32)",
        "precision",
        "M",
    )
    policy: str = _flag(
        "lean",
        "lean or torch, with rules behind: 'lean + module:classifier=fp32 + "
        "op:softmax=fp32'; or a TOML file that holds them (default lean)",
        "precision",
        "P",
    )
    epochs: int | None = _flag(
        None,
        "passes over the training data (default 20 from scratch with under 5000 "
        "texts, otherwise 3)",
        "training",
        "N",
    )
    batch_size: int = _flag(
        32,
        "texts in one optimizer step, over all processes and micro-batches "
        "(default 32)",
        "training",
        "N",
    )
    accumulate: int = _flag(
        1, "micro-batches that make up one step (default 1)", "training", "N"
    )
    lr: float | None = _flag(
        None,
        "peak learning rate (default 5e-4 from scratch, 3e-5 when fine-tuning)",
        "training",
        "X",
    )
    weight_decay: float = _flag(
        0.01,
        "of weight matrices, not of biases and norms (default 0.01)",
        "training",
        "X",
    )
    warmup: float = _flag(
        0.1, "share of the steps in which the rate rises (default 0.1)", "training", "P"
    )
    clip: float = _flag(1.0, "largest gradient norm (default 1.0)", "training", "X")
    eval_every: int | None = _flag(
        None,
        "evaluate and save a checkpoint every N steps (default once an epoch)",
        "training",
        "N",
    )
    seed: int = _flag(0, "of weights, order and dropout (default 0)", "training", "N")
    device: str = _flag(
        "auto",
        "cpu, cuda, or auto: cuda where there is one (default auto)",
        "machine",
        "D",
    )
    out: str = _flag(
        "runs/latest", "folder to write (default runs/latest)", "run", "DIR"
    )

    def __post_init__(self) -> None:
        shares = ("dropout", "mask_tokens", "warmup")
        for name in shares:
            self._check(name, lambda value: 0 <= value < 1, "at least 0 and below 1")
        for name in ("epochs", "batch_size", "accumulate", "eval_every", "limit"):
            self._check(name, lambda value: value >= 1, "at least 1")
        for name in ("lr", "clip"):
            self._check(name, lambda value: 0 < value < inf, "above 0 and finite")
        decays = "at least 0 and finite"
        self._check("weight_decay", lambda value: 0 <= value < inf, decays)
        self._check("max_length", lambda value: value >= 3, "at least 3")  # noqa: PLR2004
        seeds = f"at least 0 and below {_MOST_SEED}"
        self._check("seed", lambda value: 0 <= value < _MOST_SEED, seeds)
        self._check("out", lambda value: value.strip(), "a folder")
        self._check("data", lambda value: value.strip(), "a file or a folder")
        self._check(
            "labels",
            lambda value: all(name.strip() for name in value.split(",")),
            "names with commas between them, none of them empty",
        )
        words = (*forms.FORMS, forms.NONE)
        self._check("master", words.__contains__, f"one of {', '.join(words)}")
        devices = ("auto", "cpu", "cuda")
        self._check("device", devices.__contains__, f"one of {', '.join(devices)}")

    def _check(self, name: str, good: Any, right: str) -> None:  # noqa: ANN401
        value = getattr(self, name)
        if value is not None and not good(value):
            message = f"--{name.replace('_', '-')} {value} must be {right}."
            raise UserError(message)

    @property
    def label_names(self) -> tuple[str, ...] | None:
        """The names in --labels, white space around them dropped."""
        if self.labels is None:
            return None
        return tuple(name.strip() for name in self.labels.split(","))

    def data_dict(self) -> dict[str, Any]:
        """Return the settings as plain values."""
        return asdict(self)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Give a parser one flag for each setting, in groups.

    A flag that is not typed leaves no trace, so that resuming can tell.
    """
    groups: dict[str, Any] = {}
    for setting in fields(TrainConfig):
        about = setting.metadata
        if about["group"] not in groups:
            groups[about["group"]] = parser.add_argument_group(about["group"])
        groups[about["group"]].add_argument(
            "--" + setting.name.replace("_", "-"),
            type=_type_of(setting),
            default=argparse.SUPPRESS,
            help=about["help"],
            metavar=about["metavar"] or _type_of(setting).__name__.upper()[0],
        )


def _type_of(setting: Field[Any]) -> type:
    return _TYPES[str(setting.type).removesuffix(" | None")]


def _fits(value: object, setting: Field[Any]) -> bool:
    """Say whether a value read from JSON has the type of a setting."""
    if value is None:
        return str(setting.type).endswith(" | None")
    kind = _type_of(setting)
    return isinstance(value, (int, float) if kind is float else kind)


def typed(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that were typed, a policy's file read."""
    names = {setting.name for setting in fields(TrainConfig)}
    given = {key: value for key, value in vars(arguments).items() if key in names}
    if given.get("policy", "").endswith(".toml"):
        # The run must not depend on what becomes of the file.
        given["policy"] = str(Policy.load(given["policy"]))
    return given


def resumed(saved: dict[str, Any], given: dict[str, Any]) -> TrainConfig:
    """Return a saved run's settings, unless what was typed contradicts them.

    Raises:
        UserError: If a typed setting differs, or the saved ones are not settings.
    """
    known = {setting.name: setting for setting in fields(TrainConfig)}
    for name, value in saved.items():
        message = ""
        if name not in known:
            near = difflib.get_close_matches(name, known, 1) or ["none"]
            message = f"config.json holds {name!r}, not a setting; nearest: {near[0]}."
        elif not _fits(value, known[name]):
            right = known[name].type
            message = f"config.json: {name} is {value!r}; it must be of type {right}."
        if message:
            raise UserError(message)
    for name, value in given.items():
        kept = saved.get(name, known[name].default)
        if name != "out" and value != kept:
            assert known[name].default is not MISSING  # noqa: S101 - all have one
            message = (
                f"--{name.replace('_', '-')} {value} differs from this run's {kept}; "
                "resume without it, or start anew with another --out."
            )
            raise UserError(message)
    return TrainConfig(**saved | {"out": given.get("out", saved.get("out"))})
