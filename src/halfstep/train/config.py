"""The settings of a training run: one dataclass behind the flags and config files."""

from __future__ import annotations

import difflib
import reprlib
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import Field, asdict, dataclass, field, fields
from math import inf
from typing import TYPE_CHECKING, Any

from halfstep.errors import UserError
from halfstep.reporting.table import write_text
from halfstep.train.data.labelled_text import DEFAULT_COLUMNS, Columns

if TYPE_CHECKING:
    from pathlib import Path

_TYPES: dict[str, tuple[type, str]] = {
    "int": (int, "a whole number"),
    "float": (float, "a number"),
    "str": (str, "text in quotes"),
    "bool": (bool, "true or false"),
}
_SEEDS = 2**32  # torch takes 64 bits, and each step's seed is a multiple of it
_MAX_COUNT = 2**31 - 1
_MIN_TOKENS = 3  # one besides the two special tokens

PROBES = ("off", "flags", "sampled", "full")
"""What a probe records; all but the first are modes of `halfstep.Probe`."""
MASTERS = ("fp32", "split", "kahan", "stochastic", "none")
"""Master encodings, the default first; repeated here as masters imports torch."""

BEST_BY = {
    "classify": ("macro_f1", "accuracy", "loss"),
    "ner": ("f1", "macro_f1", "loss"),
}
"""Task -> scores that can select the best checkpoint, the default first."""
BALANCED = "balanced"
_CHANGEABLE_ON_RESUME = (
    *("data", "out", "keep", "workers", "tensorboard"),
    *("probe", "parallel", "compare_fp32"),
)
"""Settings that a resumed run may change, as none of them affects what is learned.

The checkpoint knows its data by their content.
"""

_Check = tuple[Callable[[Any], object], str]
"""A predicate on the value, and its description."""


def _split_list(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]


def _one_of(*words: str) -> _Check:
    return words.__contains__, f"one of {', '.join(words)}"


def _is_class_weights(text: str) -> bool:
    try:
        return all(0 < float(part) < inf for part in _split_list(text))
    except ValueError:
        return text.strip() == BALANCED


def _in_range(least: int, most: int) -> _Check:
    return lambda value: least <= value <= most, f"from {least} to {most}"


def _is_name(text: str) -> bool:
    return bool(text.strip()) and "\0" not in text  # no OS allows NUL in a path


def _path_of(what: str) -> _Check:
    return _is_name, f"{what}: not blank, and without NUL"


def _list_of(what: str) -> _Check:
    none_empty = f"{what} with commas between them, none of them empty"
    return lambda value: all(_split_list(value)), none_empty


_COUNT: _Check = _in_range(1, _MAX_COUNT)
_SHARE: _Check = (lambda value: 0 <= value < 1, "at least 0 and below 1")
_PART: _Check = (lambda value: 0 < value < 1, "above 0 and below 1")
_RATE: _Check = (lambda value: 0 < value < inf, "above 0 and finite")
_DECAY: _Check = (lambda value: 0 <= value < inf, "at least 0 and finite")
_FACTOR: _Check = (lambda value: 0 < value <= 1, "above 0 and at most 1")
_SEED: _Check = (lambda v: 0 <= v < _SEEDS, f"at least 0 and below {_SEEDS}")
_COLUMN: _Check = (lambda value: bool(value.strip()), "the name of a column")
_WEIGHTS: _Check = (
    _is_class_weights,
    f"{BALANCED}, or finite numbers above 0 with commas between them",
)


def _setting(default: object, check: _Check | None = None) -> Any:  # noqa: ANN401 - a field stands for its value
    return field(default=default, metadata={"check": check})


@dataclass(frozen=True)
class TrainConfig:
    """The settings of a run; `None` means: chosen from the data and the model.

    Each field is a command line flag and a key of a config file.
    """

    task: str = _setting("classify", _one_of(*BEST_BY))
    data: str | None = _setting(None, _path_of("a file or a folder"))
    text_column: str | None = _setting(None, _COLUMN)
    label_column: str | None = _setting(None, _COLUMN)
    labels: str | None = _setting(None, _list_of("names"))
    limit: int | None = _setting(None, _in_range(2, _MAX_COUNT))
    dev_share: float = _setting(0.08, _PART)
    max_length: int = _setting(128, _in_range(_MIN_TOKENS, 2**20))
    model: str = _setting("tiny", _path_of("a name or a folder"))
    dropout: float | None = _setting(None, _SHARE)
    mask_tokens: float | None = _setting(None, _SHARE)
    freeze: str | None = _setting(None, _list_of("patterns"))
    level: str = _setting("auto")  # checked by the policy package, like the next two
    dtype: str = _setting("auto")
    loss_scale: str = _setting("auto")
    master: str = _setting(MASTERS[0], _one_of(*MASTERS))
    policy: str = _setting("lean")
    epochs: int | None = _setting(None, _COUNT)
    max_steps: int | None = _setting(None, _COUNT)
    batch_size: int = _setting(32, _COUNT)
    accumulate: int = _setting(1, _COUNT)
    lr: float | None = _setting(None, _RATE)
    layer_decay: float = _setting(1.0, _FACTOR)
    weight_decay: float = _setting(0.01, _DECAY)
    warmup: float = _setting(0.1, _SHARE)
    clip: float = _setting(1.0, _RATE)
    label_smoothing: float = _setting(0.0, _SHARE)
    class_weights: str | None = _setting(None, _WEIGHTS)
    patience: int | None = _setting(None, _COUNT)
    best_by: str | None = _setting(None)
    eval_every: int | None = _setting(None, _COUNT)
    seed: int = _setting(0, _SEED)
    device: str = _setting("auto", _one_of("auto", "cpu", "cuda"))
    workers: int | None = _setting(None, _in_range(0, 1024))
    compile: bool = _setting(default=False)
    recompute: bool = _setting(default=False)
    parallel: str = _setting("ddp", _one_of("ddp", "fsdp2"))
    out: str = _setting("runs/latest", _path_of("a folder"))
    keep: int = _setting(2, _COUNT)
    tensorboard: bool = _setting(default=False)
    probe: str = _setting("off", _one_of(*PROBES))
    compare_fp32: int | None = _setting(None, _in_range(2, _MAX_COUNT))

    def __post_init__(self) -> None:
        for setting in SETTINGS.values():
            check(setting, getattr(self, setting.name))
        names, fewest = self.label_names, 2 if self.task == "classify" else 1
        if names is not None and len(set(names)) < max(fewest, len(names)):
            raise UserError(
                f"--labels {self.labels}: name {fewest} or more, each once."
            )
        if self.class_weights is not None and self.task == "ner":
            raise UserError(
                f"--class-weights {self.class_weights} is for --task classify; ner has "
                "no classes of texts: leave it out."
            )
        if self.task == "ner" and (self.text_column or self.label_column):
            raise UserError(
                "--text-column and --label-column are for --task classify; files of "
                "ner name their parts themselves: leave them out."
            )
        if len({name.strip().lower() for name in self.columns}) == 1:
            raise UserError(
                f"--text-column and --label-column are both {self.columns.text!r}; "
                "name two columns."
            )
        if self.best_score not in BEST_BY[self.task]:
            raise UserError(
                f"--best-by {self.best_by} is no score of --task {self.task}; choose "
                f"one of {', '.join(BEST_BY[self.task])}."
            )
        if self.parallel == "fsdp2" and self.master != MASTERS[0]:
            raise UserError(
                f"--master {self.master} does not go with --parallel fsdp2, whose fp32 "
                "parts are the masters already: leave --master out."
            )
        if self.accumulate > self.batch_size:
            raise UserError(
                f"--accumulate {self.accumulate} is more than --batch-size "
                f"{self.batch_size}: some micro-batches would hold no text."
            )

    @property
    def columns(self) -> Columns:
        """The columns of --text-column and --label-column, or their defaults."""
        return Columns(
            self.text_column or DEFAULT_COLUMNS.text,
            self.label_column or DEFAULT_COLUMNS.label,
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
    def weights(self) -> tuple[float, ...] | None:
        """The numbers in --class-weights; None if unset or "balanced"."""
        if self.class_weights is None or self.class_weights.strip() == BALANCED:
            return None
        return tuple(map(float, _split_list(self.class_weights)))

    @property
    def balanced(self) -> bool:
        """Whether classes are weighted by their inverse frequency."""
        return (self.class_weights or "").strip() == BALANCED

    @property
    def best_score(self) -> str:
        """The score that selects the best checkpoint: the highest, or lowest loss."""
        return self.best_by or BEST_BY[self.task][0]

    def data_dict(self) -> dict[str, Any]:
        """Return the settings as plain values."""
        return asdict(self)


SETTINGS: dict[str, Field[Any]] = {each.name: each for each in fields(TrainConfig)}


def type_of(setting: Field[Any]) -> type:
    """Return the type of a setting's values other than `None`."""
    return _TYPES[str(setting.type).removesuffix(" | None")][0]


def setting_fault(name: str, value: object) -> str:
    """Return why a name and value from a file are not a valid setting; "" if valid."""
    if name not in SETTINGS:
        near = difflib.get_close_matches(name, SETTINGS, 1)
        advice = f"nearest: {near[0]}" if near else "see halfstep train --help"
        return f"{name!r} is not a setting; {advice}"
    expected = type_of(SETTINGS[name])
    if value is None:
        is_valid = str(SETTINGS[name].type).endswith(" | None")
    elif isinstance(value, bool) or expected is bool:  # bool is a subclass of int
        is_valid = expected is bool and isinstance(value, bool)
    else:
        is_valid = isinstance(value, (int, float) if expected is float else expected)
    if is_valid:
        return ""
    _, description = _TYPES[expected.__name__]
    return f"{name} is {reprlib.repr(value)}; it must be {description}"


def flag_of(setting: Field[Any]) -> str:
    """Return the command line flag of a setting."""
    return "--" + setting.name.replace("_", "-")


def check(setting: Field[Any], value: object) -> None:
    """Raise UserError if a value of the right type is out of a setting's range."""
    check_and_description: _Check | None = setting.metadata["check"]
    if value is None or check_and_description is None:
        return
    is_valid, description = check_and_description
    if not is_valid(value):
        text = value if str(value).isprintable() else repr(value)
        raise UserError(f"{flag_of(setting)} {text} must be {description}.")


def resume_config(
    saved: Mapping[str, Any],
    explicit: Mapping[str, Any],
    resolved: Mapping[str, Any] | None = None,
) -> TrainConfig:
    """Return a saved run's settings; raise if one is invalid or contradicted.

    Settings that an older version lacked get their default. Where the saved run used a
    default, giving the value in `resolved` is no contradiction.
    """
    for name, value in saved.items():
        if fault := setting_fault(name, value):
            raise UserError(f"config.json: {fault}.")
    for name, value in explicit.items():
        saved_value = saved.get(name, SETTINGS[name].default)
        resolved_value = saved_value
        if resolved is not None and saved_value in (None, "auto"):
            resolved_value = resolved.get(name, saved_value)
        if name not in _CHANGEABLE_ON_RESUME and value not in (
            saved_value,
            resolved_value,
        ):
            word = "default" if saved_value is None else saved_value
            raise UserError(
                f"{flag_of(SETTINGS[name])} {value} differs from this run's {word}; "
                "resume without it, or start anew with another --out."
            )
    changed = {
        name: explicit[name] for name in _CHANGEABLE_ON_RESUME if name in explicit
    }
    return TrainConfig(**{**saved, **changed})


MODES = {
    "check": "train a few steps, print the time and memory that the run will take and "
    "whether level and dtype suit it, and write nothing to --out",
    "resume": "continue the run in --out from its newest checkpoint",
    "overwrite": "replace the run in --out",
}
"""Flag of `halfstep train` that selects what to do and is no setting -> its help."""
_HEADER = """\
# The settings of a run of `halfstep train`, every default resolved. What is not here
# was not set: all rows, all parameters, a fine-tuned model's own dropout.
# Run it again with
#     halfstep train --config THIS_FILE --out ANOTHER_FOLDER
"""


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
    settings: dict[str, Any] = {}
    for key, value in content.items():
        name = key.replace("-", "_")
        fault = setting_fault(name, value)
        if name in MODES:
            fault = f"{name!r} is no setting of a run; type --{name}"
        elif name in settings:
            fault = f"{name!r} is set twice, with - and with _; keep one"
        if fault:
            raise UserError(f"{path}: {fault}.")
        # An integer may be too large for float(), which then raises OverflowError.
        is_float = type_of(SETTINGS[name]) is float
        settings[name] = float(str(value)) if is_float else value
    return settings


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
