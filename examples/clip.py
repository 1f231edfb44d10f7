"""A recurrent network whose gradients explode is lost within a few steps. The fix: Clip, on each layer's gradient."""

import torch
import torch.nn.functional as F
from torch import nn

import lightning as L
from data import digits
from gradwatch import Clip, GradWatch


class Reader(L.LightningModule):
    """Reads a digit four pixels at a time, with weights that amplify what they remember."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.RNN(4, 32, nonlinearity="relu", batch_first=True)
        nn.init.eye_(self.rnn.weight_hh_l0)
        self.rnn.weight_hh_l0.data.mul_(1.2)  # 1.2 ** 16 = 18 from the first step to the last
        self.head = nn.Linear(32, 10)
        self.losses = []

    def forward(self, images):
        steps, _ = self.rnn(images.view(-1, 16, 4))
        return self.head(steps[:, -1])

    def training_step(self, batch, index):
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, index):
        images, labels = batch
        self.log("accuracy", (self(images).argmax(1) == labels).float().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)


def train(interventions: tuple = ()) -> tuple[GradWatch, float, list[float]]:
    L.seed_everything(0, verbose=False)
    learn, held_out = digits()
    model, watch = Reader(), GradWatch(interventions=interventions)
    trainer = L.Trainer(max_epochs=9, callbacks=[watch], logger=False, enable_checkpointing=False)
    trainer.fit(model, learn, held_out)
    return watch, float(trainer.callback_metrics["accuracy"]), model.losses


if __name__ == "__main__":
    unhealthy, before, unhealthy_losses = train()
    fixed, after, fixed_losses = train(interventions=(Clip(0.5),))
    print(*unhealthy.alerts, sep="\n")
    print(fixed.verdict)
    print(f"As it was, it reads {before:.0%} of the digits it never saw; alerts: {len(unhealthy.alerts)}.")
    print(f"With Clip(0.5), {after:.0%}; alerts: {len(fixed.alerts)}.")
