"""One silent recording makes the loss NaN: GradWatch names the line, the module, the batch and the example."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning as L
from gradwatch import GradWatch


class Decibels(nn.Module):
    """Loudness of what was recorded: the logarithm of its energy."""

    def __init__(self, floor: float) -> None:
        super().__init__()
        self.floor = floor

    def forward(self, waves):
        energy = waves.unflatten(1, (8, 16)).square().mean(2)
        return 10 * torch.log10(energy + self.floor)


class Listener(L.LightningModule):
    def __init__(self, floor: float) -> None:
        super().__init__()
        self.loudness = Decibels(floor)
        self.body = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU())
        self.head = nn.Linear(32, 2)

    def forward(self, waves):
        return self.head(self.body(self.loudness(waves)))

    def training_step(self, batch, index):
        waves, labels = batch
        return F.cross_entropy(self(waves), labels)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def recordings() -> DataLoader:
    """Noises, 128 samples each, that swell (1) or fade (0); in one of them the microphone was off for a while."""
    labels = torch.randint(0, 2, (1600,))
    ramp = torch.linspace(0.1, 1, 128)
    waves = torch.randn(1600, 128) * torch.where(labels[:, None] == 1, ramp, ramp.flip(0))
    waves[1003, 32:64] = 0
    return DataLoader(TensorDataset(waves, labels), batch_size=32)


def train(floor: float) -> tuple[GradWatch, float]:
    L.seed_everything(0, verbose=False)
    data = recordings()
    watch, listener = GradWatch(), Listener(floor)
    L.Trainer(max_epochs=1, callbacks=[watch], logger=False, enable_checkpointing=False).fit(listener, data)
    waves, labels = data.dataset[:1000]
    with torch.no_grad():
        right = (listener(waves).argmax(1) == labels).float().mean()
    return watch, float(right)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--floor", type=float, default=0.0, help="added to the energy; 1e-6 is the fix")
    watch, right = train(parser.parse_args().floor)
    print(*watch.alerts, sep="\n")
    print(f"It tells {right:.0%} of the noises right; alerts: {len(watch.alerts)}.")
