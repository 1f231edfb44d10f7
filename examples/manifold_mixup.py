"""Manifold mixup (Verma et al. 2019): the hidden features of two digits are mixed, at a random layer for each batch.

The model is not changed: `edit` mixes the outputs of a layer inside its `with`. With few digits and noisy labels the
benefit is visible: the network fits the noise less.
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

from gradwatch import edit

LAYERS = ["hidden1", "hidden2"]


def train(mixup: bool, epochs: int) -> float:
    """The share of held-out digits that are read correctly."""
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    inputs, targets = torch.tensor(images / 16).float(), torch.tensor(labels)
    seen = 300
    noisy = torch.where(torch.rand(seen) < 0.3, torch.randint(10, (seen,)), targets[:seen])
    model = nn.Sequential()
    for name, module in [("hidden1", nn.Linear(64, 256)), ("relu1", nn.ReLU(inplace=True))]:
        model.add_module(name, module)
    for name, module in [
        ("hidden2", nn.Linear(256, 256)),
        ("relu2", nn.ReLU(inplace=True)),
        ("head", nn.Linear(256, 10)),
    ]:
        model.add_module(name, module)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    share_of = torch.distributions.Beta(2.0, 2.0)
    for _ in range(epochs):
        for batch in torch.randperm(seen).split(50):
            optimizer.zero_grad()
            x, y = inputs[batch], noisy[batch]
            if mixup:
                order, share = torch.randperm(len(batch)), share_of.sample().item()
                layer = LAYERS[int(torch.randint(len(LAYERS), ()))]

                def mixed(h: torch.Tensor, order: torch.Tensor = order, share: float = share) -> torch.Tensor:
                    return share * h + (1 - share) * h[order]

                with edit(model, layer, output=mixed):
                    scores = model(x)
                loss = share * F.cross_entropy(scores, y) + (1 - share) * F.cross_entropy(scores, y[order])
            else:
                loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
    with torch.no_grad():
        return (model(inputs[seen:]).argmax(1) == targets[seen:]).float().mean().item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=40)
    options = parser.parse_args()
    print(f"without mixing: {train(False, options.epochs):.1%} of unseen digits read rightly")
    print(f"with mixing:    {train(True, options.epochs):.1%}")
