"""The flags of `halfstep train`: the help of each setting, and what was typed."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from halfstep.train.config import SETTINGS, flag_of, type_of
from halfstep.train.config_file import read_file

DESCRIPTION = (
    "Train a model that labels texts, or finds entities in them. Without flags: six "
    "emotions in built-in sentences, a small model from scratch, in the precision that "
    "this machine runs best."
)

HELP: dict[str, dict[str, str]] = {
    "data": {
        "task": "what is learned: classify (one label a text) or ner (entities in a "
        "text) (default classify: the simpler one)",
        "data": "file of texts and labels (.csv, .tsv, .json, .jsonl, .ndjson), for "
        "ner of entities (.json, .jsonl, .ndjson) or tagged tokens (.bmes, .bio, "
        ".bioes, .conll, .iob, .txt); or a folder with train.*, dev.* and perhaps "
        "test.* (default: a small built-in set)",
        "text_column": "column of a table, or key of a JSON row, that holds the text; "
        "for classify (default: text, or the first of two columns)",
        "label_column": "the same of the label (default: label, or the second of two "
        "columns)",
        "labels": "names of the classes in order of their ids, or of the kinds of "
        "entities, with commas (default: those in the training data)",
        "limit": "use the first N rows only (of train.*, in a folder) (default: all)",
        "dev_share": "share of a single file kept for evaluation (default 0.08: most "
        "is for training)",
        "max_length": "tokens after which a text is cut (default 128: a paragraph; "
        "longer takes more memory and time)",
    },
    "model": {
        "model": "tiny (4 layers x 256) or small (6 x 384), from scratch with a "
        "vocabulary of the training text's characters; or a folder or hub name to "
        "fine-tune (default tiny: no download, quick even on a CPU)",
        "dropout": "share of activations dropped at random (default 0.1 from scratch, "
        "as in BERT, or the fine-tuned model's own)",
        "mask_tokens": "share of training tokens hidden at random, against learning by "
        "heart (default from scratch 0.3, for ner 0.1, as a tag hangs on its own "
        "token; 0 when fine-tuning)",
        "freeze": "parameters not trained: patterns of their names, with commas, such "
        "as '*.embeddings.*' (default: none, all are trained)",
    },
    "precision": {
        "level": "how much runs in 16 bits, O0 (nothing) to O3 (everything), see "
        "`halfstep levels` (default auto: O2 where it was measured to be faster on "
        "this machine, otherwise O0; or O2 where only --dtype is given)",
        "dtype": "the 16-bit format, bf16 or fp16 (default auto: bf16, and fp16 on a "
        "GPU without bf16)",
        "loss_scale": "what the loss is multiplied by: dynamic, measured, logmax, none "
        "or a number (default auto: dynamic for fp16, in which small gradients vanish; "
        "otherwise none)",
        "master": "what is kept beside each 16-bit weight at O2: fp32, split, kahan, "
        "stochastic or none; split, kahan and stochastic need bf16 (default fp32: "
        "exact)",
        "policy": "lean or torch, with rules behind: 'lean + module:classifier=fp32 + "
        "op:softmax=fp32'; or a TOML file that holds them (default lean: fewer casts "
        "than torch)",
    },
    "training": {
        "epochs": "passes over the training data (default 20 from scratch with under "
        "5000 texts, which need repeating, otherwise 3)",
        "max_steps": "optimizer steps after which training ends, where the learning "
        "rate reaches 0 (default: none, --epochs decides; given alone, texts are "
        "repeated until then)",
        "batch_size": "texts in one optimizer step, over all processes and "
        "micro-batches (default 32: usual in fine-tuning)",
        "accumulate": "micro-batches that make up one step (default 1: the quickest; "
        "more take less memory)",
        "lr": "peak learning rate (default from scratch 5e-4, for ner 1e-3; when "
        "fine-tuning 3e-5, to keep what the model knows)",
        "layer_decay": "learning rate of each layer, as a share of the layer above's "
        "(default 1.0: all alike; 0.9 keeps more of what a fine-tuned model knows)",
        "weight_decay": "of weight matrices, not of biases and norms (default 0.01, as "
        "in BERT)",
        "warmup": "share of the steps in which the rate rises (default 0.1: the first "
        "steps are unsteady)",
        "clip": "largest gradient norm (default 1.0: no one batch throws the model "
        "far)",
        "label_smoothing": "share of each label that is spread over all (default 0.0: "
        "labels are trusted; 0.1 bears some wrong ones)",
        "class_weights": "balanced: the rarer a class, the more its texts count; or a "
        "number a class, in the order of --labels, with commas; for classify (default: "
        "all texts count alike)",
        "patience": "stop after N evaluations without a better score (default: never, "
        "as the rate falls to 0 only at the end)",
        "best_by": "score that says which weights are kept as the model: for classify "
        "macro_f1 (default: rare classes count as much), accuracy or loss; for ner f1 "
        "(default: each entity counts as much), macro_f1 or loss",
        "eval_every": "evaluate and save a checkpoint every N steps (default: once an "
        "epoch, with each text seen as often)",
        "seed": "of weights, order, dropout, hidden tokens, and the split of a single "
        "file (default 0: the same run each time)",
    },
    "machine": {
        "device": "cpu or cuda (default auto: cuda where there is one)",
        "workers": "processes that prepare batches (default 2 for a GPU, 0 on a CPU, "
        "whose cores are busy training)",
        "compile": "use torch.compile (default off: it starts slowly, and pays in long "
        "runs)",
        "recompute": "compute activations again in the backward pass instead of "
        "keeping them: less memory (default off: it takes time)",
        "parallel": "with many processes, each holds a whole model (ddp) or a part of "
        "it (fsdp2) (default ddp: faster where the model fits)",
    },
    "run": {
        "out": "folder to write (default runs/latest)",
        "keep": "newest checkpoints kept, besides the best (default 2: should one be "
        "damaged, there is one before it)",
        "tensorboard": "write the curves for TensorBoard too (default off: "
        "report.html shows them)",
        "probe": "watch each module's output and gradients, for `halfstep doctor`: "
        "flags (is all finite), sampled (how large numbers are, in each 100th step) or "
        "full (in each step) (default off: it takes time)",
    },
}
"""Group -> setting -> what is said about it."""

_METAVARS = {
    "task": "classify|ner",
    "data": "PATH",
    "text_column": "NAME",
    "label_column": "NAME",
    "labels": "A,B,C",
    "model": "NAME",
    "freeze": "A,B,C",
    "level": "O0..O3",
    "dtype": "bf16|fp16",
    "loss_scale": "SCALE",
    "master": "FORM",
    "policy": "P",
    "class_weights": "W,W",
    "device": "cpu|cuda",
    "parallel": "ddp|fsdp2",
    "best_by": "SCORE",
    "probe": "MODE",
    "out": "DIR",
    int: "N",
    float: "X",
}
"""Setting, or type of settings -> what stands for its value."""

_CONFIG_HELP = """\
A file for --config holds settings by their names, one a line; words stand in quotes. \
Flags win over it. An example:
  data = "posts.csv"
  batch_size = 16
  compile = true
"""
_EXIT_STATUS_HELP = """\
exit status:
  0    done
  1    training failed: the loss diverged, no loss scale helped, or another process \
was lost
  2    a setting, a file or the machine cannot be used; one line says why
  130  stopped by Ctrl-C (SIGINT); once steps run, after saving a checkpoint: go on \
with --resume
  143  stopped by SIGTERM, likewise
"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Give a parser one flag for each setting, in groups, and --config.

    A flag that is not typed leaves no trace, so that resuming can tell.
    """
    for title, texts in HELP.items():
        group = parser.add_argument_group(title)
        for name, text in texts.items():
            _add_flag(group, name, text)
    group.add_argument(
        "--config",
        type=Path,
        default=argparse.SUPPRESS,
        help="take settings from a TOML file, see below (default: none)",
        metavar="FILE",
    )


def _add_flag(group: argparse._ArgumentGroup, name: str, text: str) -> None:
    kind = type_of(SETTINGS[name])
    more: dict[str, Any] = {"action": "store_true"}
    if kind is not bool:
        more = {"type": kind, "metavar": _METAVARS.get(name) or _METAVARS[kind]}
    word = flag_of(SETTINGS[name])
    group.add_argument(word, default=argparse.SUPPRESS, help=text, **more)


def epilog() -> str:
    """Return what stands below the flags: files of settings, and exit statuses."""
    return f"{_CONFIG_HELP}\n{_EXIT_STATUS_HELP}"


def explicit_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the settings typed or in --config; a policy's file is read."""
    words = vars(arguments)
    settings = read_file(words["config"]) if "config" in words else {}
    settings |= {name: value for name, value in words.items() if name in SETTINGS}
    if settings.get("policy", "").endswith(".toml"):
        from halfstep.policy.rules import Policy  # with torch, which no help needs

        # The run must not depend on what becomes of the file.
        settings["policy"] = str(Policy.load(settings["policy"]))
    return settings
