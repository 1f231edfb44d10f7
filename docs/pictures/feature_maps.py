"""What FeatureMaps puts into TensorBoard: the first layer of a small network that learns to read digits.

`python docs/pictures/feature_maps.py` trains for some seconds and writes feature_maps.png beside this file.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from lightning.pytorch.loggers import TensorBoardLogger
from sklearn.datasets import load_digits
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import lightning as L
from gradwatch import FeatureMaps

TAG = "gradwatch_layers/body.0/feature_maps"


class Reader(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 16, 5, padding=2), nn.ReLU(), nn.Conv2d(16, 32, 5, stride=2), nn.ReLU())
        self.head = nn.Sequential(nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(32, 10))

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.body(images))

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        images, labels = batch
        return F.cross_entropy(self(images), labels)

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        images, labels = batch
        self.log("accuracy", (self(images).argmax(1) == labels).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=3e-3)


if __name__ == "__main__":
    L.seed_everything(0, verbose=False)
    small, labels = load_digits(return_X_y=True)
    images = torch.tensor(small / 16).float().reshape(-1, 1, 8, 8)
    images = F.interpolate(images, (32, 32), mode="bicubic").clamp(0, 1)
    data = TensorDataset(images, torch.tensor(labels))
    learn, held_out = torch.utils.data.Subset(data, range(1400)), torch.utils.data.Subset(data, range(1400, 1797))
    with TemporaryDirectory() as folder:
        logger = TensorBoardLogger(folder, name="")
        trainer = L.Trainer(max_epochs=4, logger=logger, callbacks=[FeatureMaps()], enable_checkpointing=False)
        trainer.fit(Reader(), DataLoader(learn, 50, shuffle=True), DataLoader(held_out, 397))
        events = EventAccumulator(logger.log_dir).Reload()
        Path(__file__).with_suffix(".png").write_bytes(events.Images(TAG)[-1].encoded_image_string)
    print(f"{float(trainer.callback_metrics['accuracy']):.0%} of the held-out digits are read")
