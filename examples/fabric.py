"""GradWatch in Lightning Fabric: `Watch` around the module that Fabric set up, and one call before the step."""

import argparse

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch import nn

from data import digits
from gradwatch import Watch


def train(epochs: int, precision: str) -> Watch:
    fabric = Fabric(accelerator="cpu", devices=1, precision=precision)
    fabric.launch()
    fabric.seed_everything(0)
    # a deep perceptron with sigmoids: the signal is lost on its way back to the first layers
    layers = [module for _ in range(8) for module in (nn.Linear(64, 64), nn.Sigmoid())]
    net = nn.Sequential(*layers, nn.Linear(64, 10))
    model, optimizer = fabric.setup(net, torch.optim.Adam(net.parameters(), lr=1e-3))
    learn = fabric.setup_dataloaders(digits()[0])

    with Watch(net) as watch:  # not what Fabric made of it: so layers keep their names
        for epoch in range(epochs):
            for images, labels in learn:
                loss = F.cross_entropy(model(images), labels)
                optimizer.zero_grad()
                fabric.backward(loss)
                watch.step(optimizer, loss=loss)  # after backward, before the optimizer uses the gradients
                optimizer.step()
            print(f"epoch {epoch}: loss {loss:.3f}")
    return watch


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--precision", default="32-true")
    options = parser.parse_args()
    watch = train(options.epochs, options.precision)
    print(watch.verdict)
