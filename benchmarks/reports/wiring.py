"""Reports of layers that the gradient or the optimizer does not reach."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.reports.report import report
from benchmarks.zoo.case import Fit
from benchmarks.zoo.healthy_starts import pretrained
from benchmarks.zoo.learner import adam
from benchmarks.zoo.material import CLASSES, PIXELS
from benchmarks.zoo.parts import cnn, mlp, reads_digits


class _Listed(nn.Module):
    """Hidden layers in a list, a classifier as an attribute."""

    def __init__(self, *, registered: bool) -> None:
        super().__init__()
        hidden = [nn.Linear(PIXELS if n == 0 else 16, 16) for n in range(4)]
        self.hidden = nn.ModuleList(hidden) if registered else hidden
        self.classifier = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.hidden:
            x = torch.tanh(layer(x))
        return self.classifier(x)


@report(
    "https://github.com/pytorch/pytorch/issues/715",
    "frozen",
    fix="nn.ModuleList",
    words="ModuleList",
)
def layers_in_a_list(fixed: bool) -> Fit:
    """Layers are kept in a Python list, so parameters() and the optimizer do not know them."""
    return reads_digits(_Listed(registered=fixed), adam(3e-3))


class _Cells(nn.Module):
    def __init__(self, *, registered: bool) -> None:
        super().__init__()
        cells = [nn.LSTMCell(16, 16) for _ in range(2)]
        self.embed, self.head = nn.Linear(8, 16), nn.Linear(16, CLASSES)
        self.cells = nn.ModuleList(cells) if registered else cells

    def forward(self, x: Tensor) -> Tensor:
        states: list[Any] = [None] * len(self.cells)
        for row in x.unflatten(1, (8, 8)).unbind(1):
            out = self.embed(row)
            for n, cell in enumerate(self.cells):
                states[n] = cell(out, states[n])
                out = states[n][0]
        return self.head(out)


@report(
    "https://github.com/ikostrikov/pytorch-meta-optimizer/issues/11",
    "frozen",
    fix="a container that registers the cells",
    words="ModuleList",
)
def recurrent_cells_in_a_list(fixed: bool) -> Fit:
    """LSTM cells are appended to a plain list: the recurrent part never trains."""
    return reads_digits(_Cells(registered=fixed), adam(1e-2))


class _Extracted(nn.Module):
    """An image encoder whose features are read off, and a text side, here a head."""

    def __init__(self, *, how: str) -> None:
        super().__init__()
        self.encoder, self.head = cnn((8, 8)), nn.Linear(CLASSES, CLASSES)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "no_grad":
            with torch.no_grad():
                features = self.encoder(x)
        else:
            features = self.encoder(x)
        return self.head(torch.relu(features.clone().detach() if self.how == "detach" else features))


@report(
    "https://github.com/lucidrains/CoCa-pytorch/issues/6",
    "disconnected",
    fix="features without detach()",
    layers=("net.encoder",),
)
def features_detached_by_an_extractor(fixed: bool) -> Fit:
    """The wrapper that reads an encoder's features clones and detaches them: the image encoder gets no gradient."""
    return reads_digits(_Extracted(how="" if fixed else "detach"), adam(1e-2), images=True)


@report(
    "https://github.com/rll-research/cic/issues/5",
    "disconnected",
    fix="the encoder outside torch.no_grad()",
    layers=("net.encoder",),
)
def encoder_under_no_grad(fixed: bool) -> Fit:
    """Observations are encoded inside torch.no_grad(): the CNN is never trained."""
    return reads_digits(_Extracted(how="" if fixed else "no_grad"), adam(1e-2), images=True)


class _Checkpointed(nn.Module):
    """Frozen embeddings, checkpointed blocks, a head."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.embed = nn.Linear(PIXELS, 32).requires_grad_(False)
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.head, self.reentrant = nn.Linear(32, CLASSES), reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.embed(x))
        for block in self.blocks:
            x = x + torch.relu(checkpoint(block, x, use_reentrant=self.reentrant))
        return self.head(x)


@report(
    "https://github.com/huggingface/transformers/issues/21381",
    "disconnected",
    fix="use_reentrant=False",
    layers=("net.blocks",),
    words="use_reentrant=False",
)
def checkpointing_after_frozen_embeddings(fixed: bool) -> Fit:
    """The embeddings are frozen, so the reentrant checkpoint sees no input that needs a gradient and drops all."""
    return reads_digits(_Checkpointed(reentrant=not fixed), adam(1e-2))


class _Hierarchy(nn.Module):
    """Proposals by one head, of which the best goes on by its index."""

    def __init__(self, *, soft: bool) -> None:
        super().__init__()
        self.score, self.embed, self.head = mlp(1, 16), nn.Embedding(CLASSES, 16), nn.Linear(16, CLASSES)
        self.soft = soft

    def forward(self, x: Tensor) -> Tensor:
        scores = self.score(x)
        if self.soft:
            return self.head(scores.softmax(-1) @ self.embed.weight)
        return self.head(self.embed(scores.argmax(-1)))


@report(
    "https://github.com/pytorch/pytorch/issues/1339",
    "disconnected",
    fix="a softmax in place of the argmax",
    layers=("net.score",),
)
def argmax_between_two_modules(fixed: bool) -> Fit:
    """The first module's output goes through argmax into the second: nothing flows back through an index."""
    return reads_digits(_Hierarchy(soft=fixed), adam(1e-2))


@report(
    "https://github.com/microsoft/nni/issues/4521",
    "frozen",
    fix="a new optimizer over the new layers",
    layers=("net.fc1", "net.fc2"),
)
def layers_replaced_after_the_optimizer(fixed: bool) -> Fit:
    """Pruning puts smaller layers in the place of the old ones, which the optimizer still holds."""
    net = mlp(2, 32)

    def prune() -> None:
        net.fc1, net.fc2 = nn.Linear(PIXELS, 16), nn.Linear(16, 32)

    def optimizers(module: nn.Module) -> Any:
        if fixed:
            prune()
        made = adam(3e-3)(module)
        if not fixed:
            prune()
        return made

    return reads_digits(net, optimizers)


class _Adapted(nn.Module):
    """A frozen base with low-rank adapters, and a new head."""

    def __init__(self, *, head_trains: bool) -> None:
        super().__init__()
        known = pretrained(mlp(3, 32))
        self.base = nn.ModuleList(known.get_submodule(f"fc{n + 1}") for n in range(3))
        self.down = nn.ModuleList(nn.Linear(PIXELS if n == 0 else 32, 4, bias=False) for n in range(3))
        self.up = nn.ModuleList(nn.Linear(4, 32, bias=False) for _ in range(3))
        self.score = nn.Linear(32, CLASSES)
        for layer in self.up:
            nn.init.zeros_(layer.weight)
        self.base.requires_grad_(False)
        self.score.requires_grad_(head_trains)

    def forward(self, x: Tensor) -> Tensor:
        for base, down, up in zip(self.base, self.down, self.up, strict=True):
            x = torch.relu(base(x) + up(down(x)))
        return self.score(x)


def _after(module: nn.Module, lr: float = 1e-2) -> Any:
    return torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=lr)


@report(
    "https://github.com/huggingface/peft/issues/577",
    "frozen",
    fix='modules_to_save=["score"]',
    layers=("net.score",),
)
def adapters_with_a_head_left_frozen(fixed: bool) -> Fit:
    """modules_to_save ends up None, so the new classification head keeps its random weights."""
    return reads_digits(_Adapted(head_trains=fixed), _after, steps=200)


@report(
    "https://github.com/TsingZ0/PFLlib/issues/245",
    "frozen",
    fix="freeze the base, not the head",
    layers=("net.head",),
)
def head_frozen_in_place_of_the_base(fixed: bool) -> Fit:
    """Fine-tuning means to freeze the base and freezes the head by a slip of a name."""
    net = pretrained(mlp(2, 32), known=CLASSES, steps=150)
    net.head.reset_parameters()
    (nn.Sequential(net.fc1, net.fc2) if fixed else net.head).requires_grad_(False)
    return reads_digits(net, lambda m: _after(m, 1e-3), steps=60)


@report(
    "https://github.com/espnet/espnet/issues/1863",
    "frozen",
    fix="match the beginning of a name, not any part of it",
    layers=("net.decoder_enc_proj",),
)
def pattern_that_matches_inside_names(fixed: bool) -> Fit:
    """Modules to freeze are matched anywhere in a name: "enc" freezes a projection in the decoder too."""
    net = nn.Sequential()
    for number, name in enumerate(("enc1", "enc2", "decoder1", "decoder_enc_proj", "decoder2")):
        width = 3 if number == 3 else 24  # the projection is narrow
        net.add_module(name, nn.Linear({0: PIXELS, 4: 3}.get(number, 24), width))
        net.add_module(f"act{number}", nn.ReLU())
    net.add_module("head", nn.Linear(24, CLASSES))
    net = pretrained(net, known=CLASSES)
    for layer in (net.decoder1, net.decoder_enc_proj, net.decoder2, net.head):
        layer.reset_parameters()
    for name, parameter in net.named_parameters():
        if name.startswith("enc") if fixed else "enc" in name:
            parameter.requires_grad_(False)
    return reads_digits(net, lambda m: _after(m, 3e-3), steps=200)
