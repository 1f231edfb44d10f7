"""An nn.RNN reads digits row by row and forgets them in a long pause. The fix: nn.init.orthogonal_ for its state."""

import torch
import torch.nn.functional as F
from torch import nn

import lightning as L
from data import digits
from gradwatch import GradWatch

STEPS = 40  # 8 rows, and zeros up to the length that all sequences are padded to


class Reader(L.LightningModule):
    def __init__(self, fixed: bool) -> None:
        super().__init__()
        self.rnn = nn.RNN(8, 64, batch_first=True)
        if fixed:
            nn.init.orthogonal_(self.rnn.weight_hh_l0)
        self.head = nn.Linear(64, 10)

    def forward(self, images):
        rows = images.unflatten(1, (8, 8))
        states, _ = self.rnn(F.pad(rows, (0, 0, 0, STEPS - 8)))
        return self.head(states[:, -1])

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
    trainer = L.Trainer(max_epochs=6, callbacks=[watch], enable_checkpointing=False, **options)
    trainer.fit(Reader(fixed), learn, held_out)
    return watch, float(trainer.callback_metrics["accuracy"])


if __name__ == "__main__":
    unhealthy, before = train(fixed=False, logger=False)
    fixed, after = train(fixed=True, logger=False)
    print(*unhealthy.alerts, sep="\n")
    print(f"As it was, it reads {before:.0%} of the digits it never saw; alerts: {len(unhealthy.alerts)}.")
    print(f"With orthogonal weights, {after:.0%}; alerts: {len(fixed.alerts)}.")
