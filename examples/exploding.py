"""Initial weights that ignore the width of the layer make gradients explode. The fix: nn.init.kaiming_normal_."""

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
        for _ in range(10):
            linear = nn.Linear(64, 64)
            if fixed:
                nn.init.kaiming_normal_(linear.weight, nonlinearity="relu")
            else:
                nn.init.normal_(linear.weight)  # sqrt(2 / 64) = 0.18 would keep the size of what passes
            self.body.extend([linear, nn.ReLU()])
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
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def train(fixed: bool, **options) -> tuple[GradWatch, float]:
    L.seed_everything(0, verbose=False)
    learn, held_out = digits()
    watch = GradWatch()  # this line, and the callbacks argument below, are all that GradWatch needs
    trainer = L.Trainer(max_epochs=3, callbacks=[watch], enable_checkpointing=False, **options)
    trainer.fit(Reader(fixed), learn, held_out)
    return watch, float(trainer.callback_metrics["accuracy"])


if __name__ == "__main__":
    unhealthy, before = train(fixed=False, logger=False)
    fixed, after = train(fixed=True, logger=False)
    print(*unhealthy.alerts, sep="\n")
    print(f"As it was, it reads {before:.0%} of the digits it never saw; alerts: {len(unhealthy.alerts)}.")
    print(f"With nn.init.kaiming_normal_, {after:.0%}; alerts: {len(fixed.alerts)}.")
