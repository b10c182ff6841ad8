"""Lightning's Trainer, with clipping, accumulation and a schedule."""

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
inputs = torch.randn(2560, 32)
targets = inputs.sin().sum(-1, keepdim=True) / 4


class Regression(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 1))

    def training_step(self, batch):
        x, y = batch
        self.loss = nn.functional.mse_loss(self.net(x), y)
        return self.loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), 3e-3)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0.1, 60)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


model = Regression()
trainer = Trainer(
    max_epochs=3,
    devices=1,
    precision="bf16-mixed",
    gradient_clip_val=1.0,
    accumulate_grad_batches=2,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(model, DataLoader(TensorDataset(inputs, targets), batch_size=64))

print(f"final loss {model.loss.item():.4f}")
