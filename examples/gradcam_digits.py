"""Where does a network look when it reads a digit? Grad-CAM of a small convolutional network, drawn in the terminal."""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

from gradwatch import gradcam

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=5)
options = parser.parse_args()

torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
inputs, targets = torch.tensor(images / 16).float().reshape(-1, 1, 8, 8), torch.tensor(labels)

model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1, bias=False),
    nn.ReLU(inplace=True),
    nn.Conv2d(16, 32, 3, padding=1, bias=False),
    nn.ReLU(inplace=True),
    nn.AdaptiveMaxPool2d(1),
    nn.Flatten(),
    nn.Linear(32, 10),
)
optimizer = torch.optim.Adam(model.parameters(), lr=8e-3)
for _ in range(options.epochs):
    for batch in torch.randperm(1400).split(50):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs[batch]), targets[batch]).backward()
        optimizer.step()

test, answers = inputs[1400:], targets[1400:]
print(f"reads {(model(test).argmax(1) == answers).float().mean():.0%} of the digits it has not seen")

maps = gradcam(model, "3", test)  # [N, 8, 8] in [0, 1], for each image's top class
strokes = test[:, 0] > 0.25
share = ((maps * strokes).sum((1, 2)) / maps.sum((1, 2))).mean()
print(f"{share:.0%} of what it looks at is strokes, which are {strokes.float().mean():.0%} of the image")

shades = " .:-=+*#%@"
for image, cam, answer in zip(test[:3, 0], maps[:3], answers[:3], strict=True):
    print(f"\na {answer:<16} where it looks")
    for pixels, heat in zip(image.tolist(), cam.tolist(), strict=True):
        print("".join(2 * shades[int(9 * v)] for v in pixels), "  ", "".join(2 * shades[int(9 * v)] for v in heat))
