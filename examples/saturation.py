"""Initial weights of unit variance drive every nn.Tanh to its limits. The fix: nn.init.xavier_uniform_."""

import torch
import torch.nn.functional as F
from torch import nn

import lightning as L
from data import digits
from gradwatch import GradWatch


class Reader(L.LightningModule):
    def __init__(self, fixed: bool) -> None:
        super().__init__()
        self.body = nn.Sequential()
        for width in (64, 256, 256):
            linear = nn.Linear(width, 256)
            if fixed:
                nn.init.xavier_uniform_(linear.weight)
            else:
                nn.init.normal_(linear.weight)
            self.body.extend([linear, nn.Tanh()])
        self.head = nn.Linear(256, 10)

    def forward(self, images):
        return self.head(self.body(images))

    def training_step(self, batch, index):
        images, labels = batch
        return F.cross_entropy(self(images), labels)

    def validation_step(self, batch, index):
        images, labels = batch
        self.log("accuracy", (self(images).argmax(1) == labels).float().mean())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def train(fixed: bool, **options) -> tuple[GradWatch, float]:
    L.seed_everything(0, verbose=False)
    learn, held_out = digits()
    watch = GradWatch()  # this line, and the callbacks argument below, are all that GradWatch needs
    trainer = L.Trainer(max_epochs=4, callbacks=[watch], enable_checkpointing=False, **options)
    trainer.fit(Reader(fixed), learn, held_out)
    return watch, float(trainer.callback_metrics["accuracy"])


if __name__ == "__main__":
    unhealthy, before = train(fixed=False, logger=False)
    fixed, after = train(fixed=True, logger=False)
    print(*unhealthy.alerts, sep="\n")
    print(f"As it was, it reads {before:.0%} of the digits it never saw; alerts: {len(unhealthy.alerts)}.")
    print(f"With nn.init.xavier_uniform_, {after:.0%}; alerts: {len(fixed.alerts)}.")
