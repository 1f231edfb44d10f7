"""One batch of pixels from 0 to 255 among batches from 0 to 1 makes the gradient jump. The fix: scale it too."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import lightning as L
from data import digits
from gradwatch import GradWatch


class Reader(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
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
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(fixed: bool, **options) -> tuple[GradWatch, float]:
    L.seed_everything(0, verbose=False)
    learn, held_out = digits()
    batches = [batch for _ in range(8) for batch in learn]
    images, labels = batches[150]
    batches[150] = (images if fixed else 255 * images, labels)  # from a camera whose white is 255, not 1
    learn = DataLoader(batches, batch_size=None)
    watch = GradWatch()  # this line, and the callbacks argument below, are all that GradWatch needs
    trainer = L.Trainer(max_epochs=1, callbacks=[watch], enable_checkpointing=False, **options)
    trainer.fit(Reader(), learn, held_out)
    return watch, float(trainer.callback_metrics["accuracy"])


if __name__ == "__main__":
    unhealthy, before = train(fixed=False, logger=False)
    fixed, after = train(fixed=True, logger=False)
    print(*unhealthy.alerts, sep="\n")
    print(f"As it was, it reads {before:.0%} of the digits it never saw; alerts: {len(unhealthy.alerts)}.")
    print(f"With batch 150 divided by 255, {after:.0%}; alerts: {len(fixed.alerts)}.")
