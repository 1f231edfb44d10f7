"""A loss weight of 2e-5 and float16 throughout: gradients are rounded to zero. The fix: bf16-mixed."""

import torch
import torch.nn.functional as F
from torch import nn

import lightning as L
from data import digits
from gradwatch import GradWatch


class Reader(L.LightningModule):
    def __init__(self, fixed: bool) -> None:
        super().__init__()
        self.fixed = fixed
        self.body = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.head = nn.Linear(64, 10)

    def forward(self, images):
        return self.head(self.body(images))

    def training_step(self, batch, index):
        images, labels = batch
        return 2e-5 * F.cross_entropy(self(images), labels)  # its weight beside a larger loss

    def validation_step(self, batch, index):
        images, labels = batch
        self.log("accuracy", (self(images).argmax(1) == labels).float().mean())

    def configure_optimizers(self):
        eps = 1e-8 if self.fixed else 1e-7  # in float16 the usual 1e-8 is 0
        return torch.optim.Adam(self.parameters(), lr=1e-3, eps=eps)


def train(fixed: bool, **options) -> tuple[GradWatch, float]:
    L.seed_everything(0, verbose=False)
    learn, held_out = digits()
    watch = GradWatch()  # this line, and the callbacks argument below, are all that GradWatch needs
    precision = "bf16-mixed" if fixed else "16-true"
    trainer = L.Trainer(max_epochs=3, precision=precision, callbacks=[watch], enable_checkpointing=False, **options)
    trainer.fit(Reader(fixed), learn, held_out)
    return watch, float(trainer.callback_metrics["accuracy"])


if __name__ == "__main__":
    unhealthy, before = train(fixed=False, logger=False)
    fixed, after = train(fixed=True, logger=False)
    print(*unhealthy.alerts, sep="\n")
    print(f"As it was, it reads {before:.0%} of the digits it never saw; alerts: {len(unhealthy.alerts)}.")
    print(f"With bf16-mixed, {after:.0%}; alerts: {len(fixed.alerts)}.")
