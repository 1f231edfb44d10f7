"""Eight convolutions with sigmoids learn nothing: GradWatch names the layers. `--relu` is the fix."""

import argparse
from itertools import pairwise

import torch
import torch.nn.functional as F
from lightning.pytorch.loggers import TensorBoardLogger
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning as L
from gradwatch import GradWatch


class Digits(L.LightningModule):
    def __init__(self, relu: bool) -> None:
        super().__init__()
        channels = [1, 16, 16, 16, 32, 32, 32, 32, 32]
        layers: list[nn.Module] = []
        for i, (before, after) in enumerate(pairwise(channels)):
            layers.append(nn.Conv2d(before, after, 3, padding=1, stride=2 if i == 3 else 1))
            layers += [nn.BatchNorm2d(after), nn.ReLU()] if relu else [nn.Sigmoid()]
        self.encoder = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(channels[-1], 10)

    def training_step(self, batch, index):
        images, labels = batch
        scores = self.head(self.encoder(images))
        loss = F.cross_entropy(scores, labels)
        self.log("loss", loss, prog_bar=True)
        self.log("accuracy", (scores.argmax(1) == labels).float().mean(), on_epoch=True, on_step=False, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--relu", action="store_true", help="ReLU and batch norm in place of sigmoids")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--out", default="lightning_logs")
    options = parser.parse_args()

    L.seed_everything(0)
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images / 16).float().reshape(-1, 1, 8, 8), torch.tensor(labels))

    watch = GradWatch()  # this line, and the callbacks argument below, are all that GradWatch needs
    trainer = L.Trainer(max_epochs=options.epochs, logger=TensorBoardLogger(options.out, name=""), callbacks=[watch])
    trainer.fit(Digits(options.relu), DataLoader(data, batch_size=64, shuffle=True))
    for alert in watch.alerts:  # what was printed above is here for programs
        print(alert.step, alert.rule, "in", ", ".join(alert.sites))
