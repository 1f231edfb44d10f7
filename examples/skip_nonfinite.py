"""One damaged batch in a hundred is enough to lose the run. The fix: SkipNonFinite, until the data are repaired."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import lightning as L
from data import digits
from gradwatch import GradWatch, SkipNonFinite


class Reader(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.head = nn.Linear(64, 10)
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
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def train(damaged: bool, interventions: tuple = ()) -> tuple[GradWatch, float, list[float]]:
    L.seed_everything(0, verbose=False)
    learn, held_out = digits()
    batches = [batch for _ in range(14) for batch in learn][:300]
    for place in (70, 150, 280) if damaged else ():
        images, labels = batches[place]
        images = images.clone()
        images[7, 20] = float("nan")  # a sensor that failed
        batches[place] = images, labels
    model, watch = Reader(), GradWatch(interventions=interventions)
    trainer = L.Trainer(max_epochs=1, callbacks=[watch], logger=False, enable_checkpointing=False)
    trainer.fit(model, DataLoader(batches, batch_size=None), held_out)
    return watch, float(trainer.callback_metrics["accuracy"]), model.losses


if __name__ == "__main__":
    _, clean, clean_losses = train(damaged=False)
    unhealthy, before, unhealthy_losses = train(damaged=True)
    fixed, after, fixed_losses = train(damaged=True, interventions=(SkipNonFinite(),))
    print(fixed.verdict)
    print(f"With whole data it reads {clean:.1%} of the digits it never saw.")
    print(f"With 3 of 300 batches damaged, {before:.1%}.")
    print(f"With SkipNonFinite, {after:.1%}: {fixed.history.series('skipped_steps')[-1]:.0f} steps were skipped.")
