"""The settings of a training run: one dataclass behind the flags and config files.

A new setting is one field of `TrainConfig`, with the help of its flag below it.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import reprlib
import sys
import tomllib
from argparse import ArgumentTypeError
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from itertools import compress, pairwise
from math import inf
from typing import TYPE_CHECKING, Any

from halfstep.errors import UserError
from halfstep.reporting.table import write_text
from halfstep.train.data.data_format import DataFormat

if TYPE_CHECKING:
    from pathlib import Path

_TABS = ("tab", "\\t")  # how a shell spells it
_SEEDS = 2**32  # torch takes 64 bits, and each step's seed is a multiple of it
_MAX_COUNT = 2**31 - 1
_MIN_TOKENS = 3  # one besides the two special tokens

PROBES = ("off", "flags", "sampled", "full")
"""What a probe records; all but the first are modes of `halfstep.Probe`."""
MASTERS = ("fp32", "split", "kahan", "stochastic", "none")
"""Master encodings, the default first; repeated here as masters imports torch."""
TASKS = ("classify", "ner")
BEST_BY = {
    "class": ("macro_f1", "accuracy", "loss"),
    "multi_label": ("micro_f1", "macro_f1", "loss"),
    "regression": ("spearman", "pearson", "loss"),
    "ner": ("f1", "macro_f1", "loss"),
}
"""`TrainConfig.problem` -> scores that can select the best checkpoint, the default
first."""
_ASKED_BY = {
    "class": "one class per text",
    "multi_label": "--multi-label",
    "regression": "--regression",
    "ner": "--task ner",
}
"""`TrainConfig.problem` -> what asks for it, in messages."""
_OF_TEXTS = ("class", "multi_label", "regression")
_OF_LABELS = ("class", "multi_label")
BALANCED = "balanced"
MODES = {
    "check": "train a few steps, print the time and memory that the run will take and "
    "whether level and dtype suit it, and write nothing to --out",
    "resume": "continue the run in --out from its newest checkpoint",
    "overwrite": "replace the run in --out",
}
"""Flag of `halfstep train` that selects what to do and is no setting -> its help."""

_Check = tuple[Callable[[Any], object], str]
"""A predicate on a value other than None, and the description of what is right."""


def _split_list(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]


def _one_of(*words: str) -> _Check:
    return words.__contains__, f"one of {', '.join(words)}"


def _in_range(least: int, most: int) -> _Check:
    return lambda value: least <= value <= most, f"from {least} to {most}"


def _path_of(what: str) -> _Check:
    # No operating system allows NUL in a path.
    description = f"{what}: not blank, and without NUL"
    return lambda text: text.strip() and "\0" not in text, description


def _list_of(what: str) -> _Check:
    none_empty = f"{what} with commas between them, none of them empty"
    return lambda text: all(_split_list(text)), none_empty


def _is_encoding(name: str) -> bool:
    try:
        "".encode(name)  # rejects codecs of bytes, such as hex
    except (LookupError, ValueError):
        return False
    return True


def _is_class_weights(text: str) -> bool:
    try:
        return all(0 < float(part) < inf for part in _split_list(text))
    except ValueError:
        return text.strip() == BALANCED


_COUNT = _in_range(1, _MAX_COUNT)
_SEVERAL = _in_range(2, _MAX_COUNT)
_SHARE: _Check = (lambda value: 0 <= value < 1, "at least 0 and below 1")
_PART: _Check = (lambda value: 0 < value < 1, "above 0 and below 1")
_RATE: _Check = (lambda value: 0 < value < inf, "above 0 and finite")
_DECAY: _Check = (lambda value: 0 <= value < inf, "at least 0 and finite")
_FACTOR: _Check = (lambda value: 0 < value <= 1, "above 0 and at most 1")
_SEED: _Check = (lambda value: 0 <= value < _SEEDS, f"at least 0 and below {_SEEDS}")
_COLUMN: _Check = (str.strip, "the name of a column")
_TEXT_COLUMN: _Check = (
    lambda value: all(_split_list(value)) and value.count(",") <= 1,
    "the name of a column, or two with a comma between them",
)
_ENCODING: _Check = (_is_encoding, "an encoding of Python, such as gb18030 or cp1252")
_DELIMITER: _Check = (
    lambda value: value in _TABS or (len(value) == 1 and value not in '"\r\n'),
    "one character, or tab",
)
_SEPARATOR: _Check = (lambda value: value != "", "at least one character")
_WEIGHTS: _Check = (
    _is_class_weights,
    f"{BALANCED}, or finite numbers above 0 with commas between them",
)
_FOLDER, _DEVICES = _path_of("a folder"), _one_of("auto", "cpu", "cuda")
_PARALLEL = _one_of("ddp", "fsdp2")

_TYPES = {
    "int": (int, "a whole number"),
    "float": (float, "a number, such as 0.001 or 1e-3"),
    "str": (str, "text in quotes"),
    "bool": (bool, "true or false"),
}
"""Annotation -> type, and what a value must be."""


@dataclass(frozen=True)
class Setting:
    """What a field of `TrainConfig` declares; the last three are read from it."""

    group: str
    """Heading of the help that lists it."""
    default: Any
    check: _Check | None = None
    """Its range."""
    placeholder: str = ""
    """What stands for the value in the help; "": N or X, by its type."""
    everyday: bool = False
    """Whether the short help lists it."""
    may_change: bool = False
    """Whether a resumed run may change it, as it does not affect what is learned."""
    problems: tuple[str, ...] = tuple(BEST_BY)
    """Those of `TrainConfig.problem` that it is for."""
    name: str = ""
    annotation: str = ""
    help: str = ""

    @property
    def flag(self) -> str:
        """The command line flag."""
        return "--" + self.name.replace("_", "-")

    @property
    def type(self) -> type:
        """The type of the values other than None."""
        return _TYPES[self.annotation.removesuffix(" | None")][0]

    def parse(self, text: str) -> object:
        """Return the value of a word on the command line, for argparse."""
        try:
            return self.type(text)
        except ValueError:
            _, right = _TYPES[self.type.__name__]
            raise ArgumentTypeError(f"{text!r} is not {right}") from None

    def fault(self, value: object) -> str:
        """Return why a value is of another type or out of range; "" if it is right."""
        if value is None and self.annotation.endswith(" | None"):
            return ""
        kind, right = _TYPES[self.type.__name__]
        # Not isinstance: bool is a subclass of int.
        if type(value) is kind or (kind is float and type(value) is int):
            if self.check is None or self.check[0](value):
                return ""
            _, right = self.check
        return f"{self.flag} {reprlib.repr(value)} must be {right}"


def _setting(group: str, default: object, *more: Any, **flags: Any) -> Any:  # noqa: ANN401 - a field stands for its value
    """Declare a field; arguments are those of `Setting`, the text below it the help."""
    setting = Setting(group, default, *more, **flags)
    return field(default=default, metadata={"setting": setting})


_data = partial(_setting, "data")
_model = partial(_setting, "model")
_precision = partial(_setting, "precision")
_training = partial(_setting, "training")
_machine = partial(_setting, "machine")
_run = partial(_setting, "run")


@dataclass(frozen=True)
class TrainConfig:
    """The settings of a run; `None` means: chosen from the data and the model.

    Each field is a command line flag and a key of a config file. The text below it is
    the flag's help; the default is appended where the text does not say it. Values
    without a range here are checked by the package that takes them.
    """

    task: str = _data("classify", _one_of(*TASKS), "classify|ner", everyday=True)
    """classify (labels of texts) or ner (named entities in texts)"""
    data: str | None = _data(
        None, _path_of("a file or a folder"), "PATH", everyday=True, may_change=True
    )  # the checkpoint knows its data by their content
    """file of texts and labels (.csv, .tsv, .txt, .json, .jsonl, .ndjson, .parquet), or
    for ner of entities (.json, .jsonl, .ndjson, .parquet) or tagged tokens (.bmes,
    .bio, .bioes, .conll, .iob, .iob2, .tsv, .txt), each perhaps with .gz; a folder with
    train.*, perhaps dev.* and test.*, or one of save_to_disk; or a data set of the hub,
    org/name or org/name:config (default: a small built-in set)"""
    encoding: str | None = _data(None, _ENCODING, "NAME")
    """encoding of a text file, such as gb18030, utf-16 or cp1252 (default UTF-8)"""
    delimiter: str | None = _data(None, _DELIMITER, "C", problems=_OF_TEXTS)
    """what separates the cells of a table: one character, or tab (default: seen from
    the first lines)"""
    text_column: str | None = _data(
        None, _TEXT_COLUMN, "NAME[,NAME]", everyday=True, problems=_OF_TEXTS
    )
    """column of a table, or key of a JSON row, that holds the text; a.b is key b of the
    object a; two are a pair of sentences; without a header, a number from 1 (default:
    text, or another usual name, or the first of two columns)"""
    label_column: str | None = _data(
        None, _COLUMN, "NAME", everyday=True, problems=_OF_TEXTS
    )
    """likewise for the label (default: label, or another usual name, or the second of
    two columns)"""
    skip_bad_rows: bool = _data(default=False, everyday=True)
    """leave out rows that cannot be used (blank text, no label, broken), and print how
    many of each kind (default off: they are an error)"""
    streaming: bool = _data(default=False)
    """fetch only the rows of --limit of a data set of the hub (default off: all of it
    is downloaded once)"""
    multi_label: bool = _data(default=False, everyday=True)
    """a text has any number of labels, or none (default off)"""
    label_separator: str | None = _data(
        None, _SEPARATOR, "C", problems=("multi_label",)
    )
    """what separates the labels of a text in a cell, which may also be a JSON list
    (default: a comma)"""
    regression: bool = _data(default=False, everyday=True)
    """the label is a number to predict (default off: a class)"""
    labels: str | None = _data(
        None, _list_of("names"), "A,B,C", problems=("class", "multi_label", "ner")
    )
    """names of the classes in order of their ids, or of the entity types (default:
    those in the training data)"""
    limit: int | None = _data(None, _SEVERAL)
    """use the first N rows only, of train.* in a folder (default: all)"""
    dev_share: float = _data(0.08, _PART)
    """share of a single file to evaluate on"""
    max_length: int = _data(128, _in_range(_MIN_TOKENS, 2**20), everyday=True)
    """tokens after which a text is cut; more takes more memory and time"""
    model: str = _model("tiny", _path_of("a name or a folder"), "NAME", everyday=True)
    """tiny (4 layers x 256) or small (6 x 384), from scratch with a vocabulary of the
    training text's characters; or a folder or hub name to fine-tune (default tiny: no
    download, fast on a CPU)"""
    dropout: float | None = _model(None, _SHARE)
    """share of activations dropped at random (default 0.1 from scratch, as in BERT, or
    the fine-tuned model's own)"""
    mask_tokens: float | None = _model(None, _SHARE)
    """share of training tokens masked at random, against overfitting (default from
    scratch 0.3, for ner 0.1; 0 when fine-tuning)"""
    freeze: str | None = _model(None, _list_of("patterns"), "A,B,C")
    """parameters that are not trained, by patterns of their names, such as
    '*.embeddings.*' (default: none)"""
    level: str = _precision("auto", None, "O0..O3", everyday=True)
    """how much runs in 16 bits, O0 (nothing) to O3 (everything), see `halfstep levels`
    (default auto: O2 if 16 bits were measured to be faster on this machine, otherwise
    O0; O2 if only --dtype is given)"""
    dtype: str = _precision("auto", None, "bf16|fp16")
    """the 16-bit format (default auto: bf16, and fp16 on a GPU without bf16)"""
    loss_scale: str = _precision("auto", None, "SCALE")
    """factor on the loss: dynamic, none or a number (default auto: dynamic for fp16,
    otherwise none)"""
    master_weights: str = _precision(MASTERS[0], _one_of(*MASTERS), "FORM")
    """form of the master weights at O2: fp32, split, kahan, stochastic or none; split,
    kahan and stochastic need bf16"""
    policy: str = _precision("lean", None, "P")
    """which operations run in 16 bits: lean or torch, and rules after it, such as 'lean
    + module:classifier=fp32 + op:softmax=fp32'; or a TOML file that holds a policy
    (default lean: fewer casts than torch)"""
    epochs: int | None = _training(None, _COUNT, everyday=True)
    """passes over the training data (default from scratch with under 5000 texts 10, for
    ner 12; otherwise 3)"""
    max_steps: int | None = _training(None, _COUNT)
    """optimizer steps after which training ends and the learning rate reaches 0
    (default: set by --epochs; without --epochs, texts are repeated until then)"""
    batch_size: int = _training(32, _COUNT, everyday=True)
    """texts in one optimizer step, over all processes and micro-batches"""
    accumulate: int = _training(1, _COUNT)
    """micro-batches of one step (default 1: fastest; more take less memory)"""
    lr: float | None = _training(None, _RATE, everyday=True)
    """peak learning rate (default from scratch 5e-4, for ner 1e-3; when fine-tuning
    3e-5)"""
    layer_decay: float = _training(1.0, _FACTOR)
    """factor on the learning rate from each layer to the layer below; 0.9 changes lower
    layers less"""
    weight_decay: float = _training(0.01, _DECAY)
    """weight decay of matrices, not of biases and norms"""
    warmup: float = _training(0.1, _SHARE)
    """share of the steps in which the learning rate rises"""
    clip: float | None = _training(None, _RATE)
    """norm that gradients are clipped to (default 1.0; from scratch 25, for ner 3)"""
    label_smoothing: float = _training(0.0, _SHARE, problems=("class", "ner"))
    """share of each label that is spread over all classes; 0.1 suits noisy labels"""
    class_weights: str | None = _training(None, _WEIGHTS, "W,W", problems=_OF_LABELS)
    """weights of the classes in the loss: balanced (texts / (classes x texts of the
    class): all classes weigh alike, so that a text of a class 16 times as rare weighs
    16 times as much), or one number per class in the order of --labels; with
    --multi-label the weight of texts that have the label, balanced those without
    divided by those with it (default: equal weights)"""
    patience: int | None = _training(None, _COUNT)
    """stop after N evaluations without a better score (default: never)"""
    best_by: str | None = _training(None, None, "SCORE")
    """score that selects the weights of the final model: for classes macro_f1
    (default: rare classes count as much), accuracy or loss; for --multi-label micro_f1
    (default), macro_f1 or loss; for --regression spearman (default), pearson or loss;
    for ner f1 (default: each entity counts as much), macro_f1 or loss"""
    eval_every: int | None = _training(None, _COUNT)
    """evaluate and save a checkpoint every N steps (default: once per epoch)"""
    seed: int = _training(0, _SEED)
    """seed of weights, order, dropout, masked tokens, and the split of a single file"""
    device: str = _machine("auto", _DEVICES, "cpu|cuda", everyday=True)
    """cpu or cuda (default auto: cuda if there is one)"""
    workers: int | None = _machine(None, _in_range(0, 1024), may_change=True)
    """processes that prepare batches (default 2 for a GPU, 0 on a CPU)"""
    compile: bool = _machine(default=False)
    """use torch.compile, which only long runs repay (default off)"""
    recompute: bool = _machine(default=False)
    """activation checkpointing: compute activations again in the backward pass, for
    less memory and more time (default off)"""
    parallel: str = _machine("ddp", _PARALLEL, "ddp|fsdp2", may_change=True)
    """with several processes, each holds the whole model (ddp: faster if it fits) or a
    shard of it (fsdp2)"""
    out: str = _run("runs/latest", _FOLDER, "DIR", everyday=True, may_change=True)
    """folder of the run"""
    keep: int = _run(2, _COUNT, may_change=True)
    """number of newest checkpoints to keep, besides the best (default 2: if one is
    damaged, the one before it is used)"""
    tensorboard: bool = _run(default=False, may_change=True)
    """write the curves for TensorBoard too (default off: report.html shows them)"""
    probe: str = _run("off", _one_of(*PROBES), "MODE", may_change=True)
    """record each module's output and gradients, for `halfstep doctor`: flags (finite
    or not), sampled (statistics of every 100th step) or full (statistics of every step)
    (default off: it takes time)"""
    compare_fp32: int | None = _run(None, _SEVERAL, may_change=True)
    """at the end, train N steps again in fp32 and at the level, in turn, and report
    time and memory of both (default: off)"""

    def __post_init__(self) -> None:
        for name, setting in SETTINGS.items():
            if message := setting.fault(getattr(self, name)):
                raise UserError(f"{message}.")
        self._check_problem()
        names, fewest = self.label_names, 2 if self.problem == "class" else 1
        label, message = self.label_column or "label", ""
        if names is not None and len(set(names)) < max(fewest, len(names)):
            message = f"--labels {self.labels}: name {fewest} or more, each once"
        elif label.strip().lower() in _split_list((self.text_column or "").lower()):
            message = f"--text-column and --label-column are both {label!r}; name two"
        elif self.best_score not in BEST_BY[self.problem]:
            message = f"--best-by {self.best_by} is no score of "
            message += f"{_ASKED_BY[self.problem]}; "
            message += f"choose one of {', '.join(BEST_BY[self.problem])}"
        elif self.parallel == "fsdp2" and self.master_weights != MASTERS[0]:
            message = f"--master-weights {self.master_weights} does not go with "
            message += "--parallel fsdp2, whose fp32 parts are these: leave it out"
        elif self.accumulate > self.batch_size:
            message = f"--accumulate {self.accumulate} is more than --batch-size "
            message += f"{self.batch_size}: some micro-batches would hold no text"
        if message:
            raise UserError(f"{message}.")

    def _check_problem(self) -> None:
        """Raise if settings are for different kinds of labels."""
        flags = ("--multi-label", "--regression", "--task ner")
        are_set = (self.multi_label, self.regression, self.task == "ner")
        kinds = [*compress(flags, are_set)]
        if len(kinds) > 1:
            raise UserError(f"{' and '.join(kinds)} are different labels: keep one.")
        if self.target != "class" and self.data is None:
            raise UserError(f"{kinds[0]} is for labels of --data: give the file.")
        for name, setting in SETTINGS.items():
            value = getattr(self, name)
            if self.problem not in setting.problems and value != setting.default:
                raise UserError(
                    f"{setting.flag} {value} is not for {_ASKED_BY[self.problem]}: "
                    "leave it out."
                )

    @property
    def target(self) -> str:
        """What the label of a text to classify is: class, multi_label, regression."""
        if self.multi_label:
            return "multi_label"
        return "regression" if self.regression else "class"

    @property
    def problem(self) -> str:
        """What the run learns: ner or the target, a key of `BEST_BY`."""
        return "ner" if self.task == "ner" else self.target

    @property
    def data_format(self) -> DataFormat:
        """How --data is read."""
        text = None if self.text_column is None else _split_list(self.text_column)
        return DataFormat(
            task=self.task,
            target=self.target,
            label_separator=self.label_separator,
            text_columns=None if text is None else tuple(text),
            label_column=self.label_column,
            encoding=self.encoding,
            delimiter="\t" if self.delimiter in _TABS else self.delimiter,
            skip_bad_rows=self.skip_bad_rows,
            streaming=self.streaming,
            limit=self.limit,
        )

    @property
    def label_names(self) -> tuple[str, ...] | None:
        """The names in --labels, stripped."""
        return None if self.labels is None else tuple(_split_list(self.labels))

    @property
    def frozen(self) -> tuple[str, ...]:
        """The patterns in --freeze, stripped."""
        return () if self.freeze is None else tuple(_split_list(self.freeze))

    @property
    def balanced(self) -> bool:
        """Whether classes are weighted by their inverse frequency."""
        return (self.class_weights or "").strip() == BALANCED

    @property
    def weights(self) -> tuple[float, ...] | None:
        """The numbers in --class-weights; None if unset or "balanced"."""
        if self.class_weights is None or self.balanced:
            return None
        return tuple(map(float, _split_list(self.class_weights)))

    @property
    def best_score(self) -> str:
        """The score that selects the best checkpoint: the highest, or lowest loss."""
        return self.best_by or BEST_BY[self.problem][0]

    def data_dict(self) -> dict[str, Any]:
        """Return the settings as plain values."""
        return asdict(self)


def _all_settings() -> dict[str, Setting]:
    """Return name -> setting; only the source has the texts below the fields."""
    source = ast.parse(inspect.getsource(sys.modules[__name__]))
    classes = {
        each.name: each.body for each in source.body if isinstance(each, ast.ClassDef)
    }
    texts = {
        ast.unparse(declared.target): " ".join(ast.literal_eval(text.value).split())
        for declared, text in pairwise(classes[TrainConfig.__name__])
        if isinstance(declared, ast.AnnAssign) and isinstance(text, ast.Expr)
    }
    settings = {}
    for each in fields(TrainConfig):
        setting, text = each.metadata["setting"], texts[each.name]
        if others := [each for each in BEST_BY if each not in setting.problems]:
            is_short = len(others) < len(setting.problems)
            listed = [
                _ASKED_BY[each] for each in (others if is_short else setting.problems)
            ]
            text = f"{'not ' * is_short}for {', '.join(listed)}: {text}"
        if "(default" not in text:
            text = f"{text} (default {each.default})"
        settings[each.name] = replace(
            setting, name=each.name, annotation=str(each.type), help=text
        )
    return settings


SETTINGS = _all_settings()
"""Name -> setting, in the order of the help."""


def _valid(content: Mapping[str, Any], file: object) -> dict[str, Any]:
    """Return the settings in a file by name; raise UserError if one is invalid."""
    settings: dict[str, Any] = {}
    for key in content:
        name, value = key.replace("-", "_"), content[key]
        if name in MODES:
            fault = f"{name!r} is no setting of a run; type --{name}"
        elif name in settings:
            fault = f"{name!r} is set twice, with - and with _; keep one"
        elif name not in SETTINGS:
            near = difflib.get_close_matches(name, SETTINGS, 1)
            advice = f"nearest: {near[0]}" if near else "see halfstep train --help-all"
            fault = f"{name!r} is not a setting; {advice}"
        else:
            if SETTINGS[name].type is float and type(value) is int:
                value = float(str(value))  # float(value) overflows where it is inf
            fault = SETTINGS[name].fault(value)
        if fault:
            raise UserError(f"{file}: {fault}.")
        settings[name] = value
    return settings


def resume_config(
    saved: Mapping[str, Any],
    explicit: Mapping[str, Any],
    resolved: Mapping[str, Any] | None = None,
) -> TrainConfig:
    """Return a saved run's settings; raise if one is invalid or contradicted.

    Settings that an older version lacked get their default. Where the saved run used a
    default, giving the value in `resolved` is no contradiction.
    """
    settings = _valid(saved, "config.json")
    changed = {}
    for name, value in explicit.items():
        setting = SETTINGS[name]
        same = [settings.get(name, setting.default)]
        if resolved is not None and same[0] in (None, "auto"):
            same.append(resolved.get(name, same[0]))
        if setting.may_change:
            changed[name] = value
        elif value not in same:
            word = "default" if same[0] is None else same[0]
            raise UserError(
                f"{setting.flag} {value} differs from this run's {word}; resume "
                "without it, or start anew with another --out."
            )
    return TrainConfig(**{**settings, **changed})


def read_file(path: Path, flag: str = "--config") -> dict[str, Any]:
    """Return the valid settings in a file that a flag names, without defaults."""
    try:
        content = tomllib.loads(path.read_bytes().decode("utf-8-sig"))
    except OSError as error:
        raise UserError(f"{flag} {path} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{path} is not TOML: {error}; write a setting a line, such as model = "
            '"tiny".'
        ) from None
    return _valid(content, path)


_HEADER = """\
# The settings of a run of `halfstep train`, every default resolved. What is not here
# was not set: all rows, all parameters, a fine-tuned model's own dropout.
# Run it again with
#     halfstep train --config THIS_FILE --out ANOTHER_FOLDER
"""


def write_resolved(path: Path, mapping: Mapping[str, Any]) -> None:
    """Write settings as TOML that `--config` reads back to the same `TrainConfig`."""
    import tomli_w

    settings = TrainConfig(**mapping).data_dict()
    non_null = {name: value for name, value in settings.items() if value is not None}
    try:
        write_text(path, _HEADER + tomli_w.dumps(non_null))
    except (OSError, UnicodeEncodeError) as error:
        # A name from the command line may contain bytes that are not UTF-8.
        raise UserError(f"{path} cannot be written: {error}.") from error
