"""A weight decay meant for AdamW at lr=1e-3 is a hundred times as strong in SGD at lr=0.1. The fix: 0.01."""

import torch
import torch.nn.functional as F
from torch import nn

import lightning as L
from data import digits
from gradwatch import GradWatch


class Reader(L.LightningModule):
    def __init__(self, fixed: bool) -> None:
        super().__init__()
        self.decay = 0.01 if fixed else 1.0
        self.body = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.head = nn.Linear(64, 10)

    def forward(self, images):
        return self.head(self.body(images))

    def training_step(self, batch, index):
        images, labels = batch
        return F.cross_entropy(self(images), labels)

    def validation_step(self, batch, index):
        images, labels = batch
        self.log("accuracy", (self(images).argmax(1) == labels).float().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, weight_decay=self.decay)


def train(fixed: bool, **options) -> tuple[GradWatch, float]:
    L.seed_everything(0, verbose=False)
    learn, held_out = digits()
    watch = GradWatch()  # this line, and the callbacks argument below, are all that GradWatch needs
    trainer = L.Trainer(max_epochs=8, callbacks=[watch], enable_checkpointing=False, **options)
    trainer.fit(Reader(fixed), learn, held_out)
    return watch, float(trainer.callback_metrics["accuracy"])


if __name__ == "__main__":
    unhealthy, before = train(fixed=False, logger=False)
    fixed, after = train(fixed=True, logger=False)
    print(*unhealthy.alerts, sep="\n")
    print(f"As it was, it reads {before:.0%} of the digits it never saw; alerts: {len(unhealthy.alerts)}.")
    print(f"With weight_decay=0.01, {after:.0%}; alerts: {len(fixed.alerts)}.")
