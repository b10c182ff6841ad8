"""Settings of `halfstep train` to try things with, and what words come to.

In: words of a command line. Out: settings as the program takes them.
"""

import argparse
from typing import Any

from halfstep.train.flags import add_flags, explicit_settings

# Away from its default, in range, and what stands for it on the command line.
OTHERS: dict[str, Any] = {
    "task": "ner",
    "data": "posts.csv",
    "encoding": "gb18030",
    "delimiter": "|",
    "text_column": "review",
    "label_column": "stars",
    "skip_bad_rows": True,
    "streaming": True,
    "multi_label": True,
    "label_separator": "|",
    "regression": True,
    "labels": "no,yes",
    "limit": 100,
    "dev_share": 0.25,
    "max_length": 64,
    "model": "small",
    "dropout": 0.5,
    "mask_tokens": 0.0,
    "freeze": "*.embeddings.*, *.bias",
    "level": "O1",
    "dtype": "fp16",
    "loss_scale": "1024",
    "master_weights": "split",
    "policy": "torch + module:classifier=fp32",
    "epochs": 7,
    "max_steps": 50,
    "batch_size": 8,
    "accumulate": 2,
    "lr": 0.001,
    "layer_decay": 0.9,
    "weight_decay": 0.0,
    "warmup": 0.0,
    "clip": 0.5,
    "label_smoothing": 0.1,
    "class_weights": "1,2.5",
    "patience": 3,
    "best_by": "loss",
    "eval_every": 10,
    "seed": 3,
    "device": "cpu",
    "workers": 1,
    "compile": True,
    "recompute": True,
    "parallel": "fsdp2",
    "out": "runs/other",
    "keep": 1,
    "tensorboard": True,
    "probe": "sampled",
    "compare_fp32": 5,
}


def without(*names: str) -> dict[str, Any]:
    """Return `OTHERS` without some."""
    return {name: value for name, value in OTHERS.items() if name not in names}


TOGETHER = (
    without(
        *("class_weights", "master_weights", "delimiter"),
        *("text_column", "label_column"),
        *("multi_label", "label_separator", "regression"),
    ),
    without("task", "parallel", "label_smoothing", "regression"),
    without(
        *("task", "parallel", "multi_label", "label_separator", "labels"),
        *("class_weights", "label_smoothing"),
    ),
)
"""Sets of settings that go with each other, and hold all of `OTHERS` between them."""


def parse(*words: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return explicit_settings(parser.parse_args(words))
