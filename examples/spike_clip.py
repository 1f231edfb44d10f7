"""Two batches at 30 times the usual scale set a network of 40 layers back by dozens of steps. The fix: SpikeClip."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import lightning as L
from data import digits
from gradwatch import GradWatch, SpikeClip

LOUD = (120, 200)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        nn.init.normal_(self.linear.weight, std=0.025)

    def forward(self, features):
        return features + torch.relu(self.linear(features))


class Reader(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 32), *(Block() for _ in range(38)))
        self.head = nn.Linear(32, 10)
        self.losses = []

    def forward(self, images):
        return self.head(self.body(images))

    def training_step(self, batch, index):
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, index):
        images, labels = batch
        self.log("accuracy", (self(images).argmax(1) == labels).float().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


def train(interventions: tuple = ()) -> tuple[GradWatch, float, list[float]]:
    L.seed_everything(0, verbose=False)
    learn, held_out = digits()
    batches = [batch for _ in range(10) for batch in learn]
    for place in LOUD:
        images, labels = batches[place]
        batches[place] = 30 * images, labels
    model, watch = Reader(), GradWatch(interventions=interventions)
    trainer = L.Trainer(max_epochs=1, callbacks=[watch], logger=False, enable_checkpointing=False)
    trainer.fit(model, DataLoader(batches, batch_size=None), held_out)
    return watch, float(trainer.callback_metrics["accuracy"]), model.losses


def afterwards(losses: list[float]) -> float:
    """The mean loss of the 20 steps after each loud batch."""
    after = [loss for place in LOUD for loss in losses[place + 1 : place + 21]]
    return sum(after) / len(after)


if __name__ == "__main__":
    unhealthy, before, unhealthy_losses = train()
    fixed, after, fixed_losses = train(interventions=(SpikeClip(),))
    print(fixed.verdict)
    print(f"As it was, the mean loss of the 20 steps after such a batch is {afterwards(unhealthy_losses):.2f}.")
    print(f"With SpikeClip, {afterwards(fixed_losses):.2f}.")
    print(f"Of the digits it never saw it reads {before:.1%} without, and {after:.1%} with.")
