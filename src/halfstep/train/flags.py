"""Defines the command-line flags of `halfstep train`, their help and exit statuses."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from halfstep.train.config import MODES, SETTINGS, flag_of, read_file, type_of

DESCRIPTION = (
    "Train a model that classifies texts, or finds entities in them. Without flags, a "
    "small model learns six emotions from built-in sentences, at the level recommended "
    "for this machine."
)

HELP: dict[str, dict[str, str]] = {
    "data": {
        "task": "classify (one label per text) or ner (named entities in texts) "
        "(default classify)",
        "data": "file of texts and labels (.csv, .tsv, .json, .jsonl, .ndjson), for "
        "ner of entities (.json, .jsonl, .ndjson) or tagged tokens (.bmes, .bio, "
        ".bioes, .conll, .iob, .txt); or a folder with train.*, dev.* and perhaps "
        "test.* (default: a small built-in set)",
        "text_column": "column of a table, or key of a JSON row, that holds the text; "
        "for classify (default: text, or the first of two columns)",
        "label_column": "likewise for the label (default: label, or the second of two "
        "columns)",
        "labels": "names of the classes in order of their ids, or of the entity types, "
        "separated by commas (default: those in the training data)",
        "limit": "use the first N rows only (of train.*, in a folder) (default: all)",
        "dev_share": "share of a single file to evaluate on (default 0.08)",
        "max_length": "tokens after which a text is cut (default 128; more takes more "
        "memory and time)",
    },
    "model": {
        "model": "tiny (4 layers x 256) or small (6 x 384), from scratch with a "
        "vocabulary of the training text's characters; or a folder or hub name to "
        "fine-tune (default tiny: no download, fast on a CPU)",
        "dropout": "share of activations dropped at random (default 0.1 from scratch, "
        "as in BERT, or the fine-tuned model's own)",
        "mask_tokens": "share of training tokens masked at random, against overfitting "
        "(default from scratch 0.3, for ner 0.1; 0 when fine-tuning)",
        "freeze": "parameters that are not trained: patterns of their names, separated "
        "by commas, such as '*.embeddings.*' (default: none)",
    },
    "precision": {
        "level": "how much runs in 16 bits, O0 (nothing) to O3 (everything), see "
        "`halfstep levels` (default auto: O2 if 16 bits were measured to be faster on "
        "this machine, otherwise O0; O2 if only --dtype is given)",
        "dtype": "the 16-bit format, bf16 or fp16 (default auto: bf16, and fp16 on a "
        "GPU without bf16)",
        "loss_scale": "factor on the loss: dynamic, none or a number "
        "(default auto: dynamic for fp16, otherwise none)",
        "master": "form of the master weights at O2: fp32, split, kahan, stochastic or "
        "none; split, kahan and stochastic need bf16 (default fp32)",
        "policy": "which operations run in 16 bits: lean or torch, and rules after it, "
        "such as 'lean + module:classifier=fp32 + op:softmax=fp32'; or a TOML file "
        "that holds a policy (default lean: fewer casts than torch)",
    },
    "training": {
        "epochs": "passes over the training data (default 20 from scratch with under "
        "5000 texts, otherwise 3)",
        "max_steps": "optimizer steps after which training ends and the learning rate "
        "reaches 0 (default: set by --epochs; without --epochs, texts are repeated "
        "until then)",
        "batch_size": "texts in one optimizer step, over all processes and "
        "micro-batches (default 32)",
        "accumulate": "micro-batches of one step (default 1: fastest; more take less "
        "memory)",
        "lr": "peak learning rate (default from scratch 5e-4, for ner 1e-3; when "
        "fine-tuning 3e-5)",
        "layer_decay": "factor on the learning rate from each layer to the layer below "
        "(default 1.0: all layers alike; 0.9 changes lower layers less)",
        "weight_decay": "weight decay of matrices, not of biases and norms (default "
        "0.01, as in BERT)",
        "warmup": "share of the steps in which the learning rate rises (default 0.1)",
        "clip": "norm that gradients are clipped to (default 1.0)",
        "label_smoothing": "share of each label that is spread over all classes "
        "(default 0.0; 0.1 suits noisy labels)",
        "class_weights": "weights of the classes in the loss: balanced (rare classes "
        "weigh more), or one number per class in the order of --labels, separated by "
        "commas; for classify (default: equal weights)",
        "patience": "stop after N evaluations without a better score (default: never)",
        "best_by": "score that selects the weights of the final model: for classify "
        "macro_f1 (default: rare classes count as much), accuracy or loss; for ner f1 "
        "(default: each entity counts as much), macro_f1 or loss",
        "eval_every": "evaluate and save a checkpoint every N steps (default: once per "
        "epoch)",
        "seed": "seed of weights, order, dropout, masked tokens, and the split of a "
        "single file (default 0)",
    },
    "machine": {
        "device": "cpu or cuda (default auto: cuda if there is one)",
        "workers": "processes that prepare batches (default 2 for a GPU, 0 on a CPU)",
        "compile": "use torch.compile (default off: compiling takes time, which only "
        "long runs regain)",
        "recompute": "activation checkpointing: compute activations again in the "
        "backward pass, for less memory (default off: it takes time)",
        "parallel": "with several processes, each holds the whole model (ddp) or a "
        "shard of it (fsdp2) (default ddp: faster if the model fits)",
    },
    "run": {
        "out": "folder of the run (default runs/latest)",
        "keep": "number of newest checkpoints to keep, besides the best (default 2: if "
        "one is damaged, the one before it is used)",
        "tensorboard": "write the curves for TensorBoard too (default off: "
        "report.html shows them)",
        "probe": "record each module's output and gradients, for `halfstep doctor`: "
        "flags (finite or not), sampled (statistics of every 100th step) or full "
        "(statistics of every step) (default off: it takes time)",
        "compare_fp32": "at the end, train N steps again in fp32 and at the level, in "
        "turn, after 3 that are not timed; report time and memory of both (default: "
        "off)",
    },
}
"""Group -> setting -> its help."""

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
"""Setting, or type of a setting -> placeholder of its value in the help."""

EPILOG = """\
A --config file is TOML: one setting per line, by its name; text is in quotes. \
Flags override it. Example:
  data = "posts.csv"
  batch_size = 16
  compile = true

exit status:
  0    done
  1    training failed: the loss diverged, the loss scale collapsed, or another \
process was lost
  2    a setting, a file or the machine cannot be used; one line says why
  130  stopped by Ctrl-C (SIGINT), after saving a checkpoint if steps were running: \
continue with --resume
  143  stopped by SIGTERM, likewise
"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add one flag per setting, in groups, --config, and the modes.

    A flag that is not typed sets no attribute, so that resuming can tell it apart from
    one typed with its default.
    """
    for title, texts in HELP.items():
        group = parser.add_argument_group(title)
        for name, text in texts.items():
            kind = type_of(SETTINGS[name])
            more: dict[str, Any] = {"action": "store_true"}
            if kind is not bool:
                more = {"type": kind, "metavar": _METAVARS.get(name) or _METAVARS[kind]}
            word = flag_of(SETTINGS[name])
            group.add_argument(word, default=argparse.SUPPRESS, help=text, **more)
    group.add_argument(
        "--config",
        type=Path,
        default=argparse.SUPPRESS,
        help="take settings from a TOML file, see below (default: none)",
        metavar="FILE",
    )
    modes = parser.add_argument_group("mode, at most one of")
    mode = modes.add_mutually_exclusive_group()
    for name, text in MODES.items():
        mode.add_argument(f"--{name}", action="store_true", help=text)


def explicit_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the settings given as flags or in --config, with a policy file inlined."""
    words = vars(arguments)
    settings = read_file(words["config"]) if "config" in words else {}
    settings |= {name: value for name, value in words.items() if name in SETTINGS}
    if settings.get("policy", "").endswith(".toml"):
        from halfstep.policy.rules import Policy  # loads torch, unlike --help

        # The run must not change if the file does.
        settings["policy"] = str(Policy.load(settings["policy"]))
    return settings
