"""Loads the model to plan, and a batch for it.

In: `module:function`, a saved program, or a folder. Out: a model and its inputs. For
folders the weights are random: a plan only needs operations, shapes and times.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import sys
import warnings
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.errors import UserError, require_type


def load_model(
    word: str, batch: int, length: int, *, trusts_file: bool = False
) -> tuple[nn.Module, tuple[Any, ...]]:
    """Return a model and the positional arguments for one batch.

    Args:
        word: `module:function`, a function without arguments that returns both; a file
            of `torch.export.save`; or the folder of a transformers model, or of a run
            of `halfstep train`.
        batch: Number of texts, for a folder.
        length: Tokens per text, for a folder.
        trusts_file: Allow loading a saved program, which can execute code.

    Raises:
        UserError: If it is none of these, or cannot be loaded.
    """
    module, colon, function = word.partition(":")
    if Path(word).is_dir():
        return _from_folder(Path(word), batch, length)
    if Path(word).suffix == ".pt2":
        return _from_program(Path(word), trusts_file=trusts_file)
    if module.endswith(".py"):
        raise UserError(
            f"{word}: give the module's name, {module.removesuffix('.py')}:..."
        )
    if not colon or not all(part.isidentifier() for part in module.split(".")):
        raise UserError(
            f"{word} is no folder; give module:function, a function that returns a "
            "model and its inputs, or the folder of a transformers model or a run."
        )
    sys.path.insert(0, "")  # as `python -m` does
    try:
        make = getattr(importlib.import_module(module), function)
        expected = "a function that returns a model and its inputs"
        require_type(word, make, callable(make), expected)
        result = make()
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0] and error.name != module:
            raise
        raise UserError(f"there is no module named {module}.") from error
    except AttributeError as error:
        if error.name != function:
            raise
        raise UserError(f"{module} has no {function}.") from error
    match result:
        case (nn.Module() as model, list() | tuple() as inputs):
            return model, tuple(inputs)
    raise UserError(f"{word} must return a model and a tuple of its inputs.")


def _from_program(
    path: Path, *, trusts_file: bool
) -> tuple[nn.Module, tuple[Any, ...]]:
    """Load a saved program as a module, with its example inputs."""
    if not path.is_file():
        raise UserError(f"there is no file {path}.")
    if not trusts_file:
        # Besides unpickling, torch evaluates shape expressions in it as Python code.
        raise UserError(
            f"{path}: a saved program can run any code when it is loaded. If you trust "
            "its author, add --trust-file."
        )
    if not zipfile.is_zipfile(path):
        raise UserError(f"{path} is no program of torch.export.save.")
    try:
        with warnings.catch_warnings():
            # Raised by torch 2.9 for each weight.
            warnings.filterwarnings("ignore", "The given buffer is not writable")
            program = torch.export.load(path)
    except (OSError, RuntimeError, ValueError) as error:
        raise UserError(f"{path} cannot be loaded by torch.export: {error}") from error
    args, kwargs = program.example_inputs or ((), {})
    if kwargs:
        raise UserError(
            f"{path}: inputs given by name ({', '.join(kwargs)}) cannot be planned "
            "for; export the model with positional ones."
        )
    return program.module(), tuple(args)


def _from_folder(
    folder: Path, batch: int, length: int
) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Return a transformers model with random weights, and token inputs."""
    from halfstep.train import dependencies
    from halfstep.train.model import load_config
    from halfstep.train.output.run_directory import RunFolder

    dependencies.check("halfstep plan of a folder", dependencies.TO_PREDICT)
    import transformers

    run = RunFolder(folder)
    config = load_config(run.model if run.model.is_dir() else folder)
    config.use_cache = False  # a graph must return tensors
    name = (config.architectures or ["none"])[0]
    kind = getattr(transformers, name, None)
    if kind is None:
        raise UserError(f"{folder}: transformers has no architecture {name}.")
    if not hasattr(config, "vocab_size"):
        raise UserError(
            f"{folder}: {name} takes no tokens; give module:function, which returns it "
            "with its inputs."
        )
    positions = getattr(config, "max_position_embeddings", None) or length
    tokens = torch.randint(1, config.vocab_size, (batch, min(length, positions - 2)))
    end = getattr(config, "eos_token_id", None)
    if isinstance(end, int) and 1 < end < config.vocab_size:
        tokens[tokens == end] = end - 1
        tokens[:, -1] = end  # some classifiers look for the last token
    model: nn.Module = kind(config)
    arguments = {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "decoder_input_ids": tokens,
    }
    names = itertools.takewhile(
        arguments.__contains__, inspect.signature(model.forward).parameters
    )
    return model.train(), tuple(arguments[each] for each in names)
