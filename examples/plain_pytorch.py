"""GradWatch in a plain PyTorch loop, without Lightning: three lines, marked below."""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

from gradwatch import Watch  # 1

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=5)
options = parser.parse_args()

torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
inputs, targets = torch.tensor(images / 16).float(), torch.tensor(labels)

# a deep perceptron with sigmoids: the signal is lost on its way back to the first layers
layers = [module for _ in range(8) for module in (nn.Linear(64, 64), nn.Sigmoid())]
model = nn.Sequential(*layers, nn.Linear(64, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

with Watch(model) as watch:  # 2
    for epoch in range(options.epochs):
        for batch in torch.randperm(len(inputs)).split(64):
            loss = F.cross_entropy(model(inputs[batch]), targets[batch])
            optimizer.zero_grad()
            loss.backward()
            watch.step(optimizer)  # 3: after backward, before the optimizer uses the gradients
            optimizer.step()
        print(f"epoch {epoch}: loss {loss:.3f}")

print(watch.verdict)
