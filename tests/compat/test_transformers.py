"""transformers' Trainer on a session, against the Trainer itself."""

import doctest
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments

import halfstep.compat.transformers as adapter
from halfstep.compat.transformers import Trainer
from halfstep.testing import overflow_in_backward

CONFIG = BertConfig(
    vocab_size=60,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=64,
    max_position_embeddings=16,
    num_labels=3,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)


@pytest.fixture(autouse=True)
def _fresh_state() -> Iterator[None]:
    """Accelerate keeps what the first Accelerator of a process was told."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


class Texts(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __init__(self) -> None:
        random = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(60, (64, 8), generator=random)

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = self.tokens[index]
        return {
            "input_ids": tokens,
            "attention_mask": torch.ones_like(tokens),
            "labels": tokens[0] % 3,
        }


def make(
    folder: Path,
    kind: type[transformers.Trainer] = Trainer,
    trainer: dict[str, Any] | None = None,
    **args: Any,
) -> Any:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    transformers.set_seed(0)
    settings = {
        "learning_rate": 3e-3,
        "num_train_epochs": 2,
        "per_device_train_batch_size": 8,
        "logging_steps": 1,
        "report_to": "none",
        "use_cpu": True,
        "save_strategy": "no",
        "disable_tqdm": True,
        "optim": "adamw_torch",
    }
    model = BertForSequenceClassification(CONFIG)
    arguments = TrainingArguments(str(folder), **settings | args)
    return kind(model, arguments, train_dataset=Texts(), **trainer or {})


def losses(trainer: Any) -> list[float]:
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


@pytest.mark.parametrize("accumulation", [1, 3])
def test_in_fp32_it_is_the_trainer(tmp_path: Path, accumulation: int) -> None:
    """Law: without a 16-bit format, losses and norms are the Trainer's."""
    logs = []
    for kind in (transformers.Trainer, Trainer):
        trainer = make(tmp_path, kind, gradient_accumulation_steps=accumulation)
        trainer.train()
        rows = trainer.state.log_history[:-1]
        logs.append([(r["loss"], r["grad_norm"], r["learning_rate"]) for r in rows])
    assert len(logs[0]) == len(logs[1])
    for before, after in zip(*logs, strict=True):
        assert after == pytest.approx(before, rel=1e-4)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_skipped_step_is_told(tmp_path: Path, level: str) -> None:
    """Law: under fused AdamW an overflow moves neither weights nor the schedule."""
    flags: list[tuple[bool, float, float]] = []

    class Watch(transformers.TrainerCallback):
        def on_step_end(self, *_args: Any, **_kwargs: Any) -> None:
            weights = trainer.session.weights()
            total = sum(w.double().sum().item() for w in weights.values())
            skipped = trainer.accelerator.optimizer_step_was_skipped
            flags.append((skipped, trainer.lr_scheduler.get_last_lr()[0], total))

    trainer = make(
        tmp_path,
        trainer={"level": level, "callbacks": [Watch()]},
        bf16=True,
        optim="adamw_torch_fused",
        max_steps=4,
    )
    with overflow_in_backward(trainer.model, at=3):
        trainer.train()
    assert [skipped for skipped, _, _ in flags] == [False, False, True, False]
    assert flags[2][1:] == flags[1][1:]
    assert flags[3][1] < flags[2][1]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_resumed_run_is_the_same_to_the_bit(tmp_path: Path, level: str) -> None:
    """Law: resume_from_checkpoint goes on as if nothing had happened."""
    kwargs = {"trainer": {"level": level}, "bf16": True}
    straight = make(tmp_path, **kwargs, save_strategy="epoch")
    straight.train()
    resumed = make(tmp_path, **kwargs)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))
    ends = [trainer.session.weights() for trainer in (straight, resumed)]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
    assert losses(straight)[8:] == losses(resumed)[8:]


def test_saved_weights_are_the_masters(tmp_path: Path) -> None:
    """Law: what is saved is fp32, says so, and loads as it was."""
    trainer = make(tmp_path, trainer={"level": "O2"}, bf16=True)
    trainer.train()
    trainer.save_model(str(tmp_path / "model"))
    assert next(trainer.model.parameters()).dtype == torch.bfloat16
    assert (
        json.loads((tmp_path / "model/config.json").read_text())["dtype"] == "float32"
    )
    loaded = BertForSequenceClassification.from_pretrained(
        tmp_path / "model", dtype="auto"
    )
    weights = trainer.session.weights()
    for name, weight in loaded.named_parameters():
        assert weight.dtype == torch.float32
        assert torch.equal(weight, weights[name]), name


def test_example_of_the_module_runs() -> None:
    """Law: the examples of its docstrings hold; pytest does not look for them there."""
    results = doctest.testmod(adapter)
    assert results.attempted
    assert not results.failed
