"""The same at level O2: 16-bit weights, fp32 master weights and fp32 checkpoints."""

import tempfile

import torch
from transformers import BertConfig, BertForSequenceClassification
from halfstep.compat.transformers import Trainer, TrainingArguments, set_seed

set_seed(0)
config = BertConfig(
    vocab_size=100,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=128,
    num_labels=2,
)
tokens = torch.randint(100, (512, 16))
texts = [{"input_ids": t, "labels": (t < 50).sum() > 8} for t in tokens]

trainer = Trainer(
    BertForSequenceClassification(config),
    TrainingArguments(
        tempfile.mkdtemp(),
        bf16=True,
        use_cpu=not torch.cuda.is_available(),
        optim="adamw_torch_fused",
        learning_rate=1e-3,
        num_train_epochs=4,
        per_device_train_batch_size=16,
        logging_steps=32,
        disable_tqdm=True,
        report_to="none",
        save_strategy="no",
    ),
    train_dataset=[{**t, "labels": t["labels"].long()} for t in texts],
    level="O2",
)
trainer.train()
losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
print(f"final loss {float(losses[-1]):.4f}")
