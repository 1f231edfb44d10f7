"""Healthy readers of sequences and sets: language models, recurrent nets, sparse and rare parts, graphs."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.zoo.case import Fit, healthy
from benchmarks.zoo.learner import Learner, accuracy, adam, classify, misfit, mistakes, regress, sgd, surprise
from benchmarks.zoo.material import BYTES, CLASSES, PIXELS, Pair, draw, first_symbol, flat_digits, snippets
from benchmarks.zoo.parts import GPT, Last, Residual, mlp, reads_digits, reads_text


@healthy(quick=True)
def language_model() -> Fit:
    """A small GPT on source text."""
    return reads_text(GPT(), adam(3e-3))


@healthy()
def language_model_tied() -> Fit:
    """The head's weights are the embedding's: one gradient, from both ends of the model."""
    net = GPT()
    nn.init.normal_(net.token.weight, std=0.1)
    net.head.weight = net.token.weight
    return reads_text(net, adam(3e-3))


class CharLSTM(nn.Module):
    """Codes [N, span] -> logits [N, span, 128]."""

    def __init__(self, kind: type[nn.Module] = nn.LSTM) -> None:
        super().__init__()
        self.token, self.rnn = nn.Embedding(BYTES, 24), kind(24, 48, batch_first=True)
        self.head = nn.Linear(48, BYTES)

    def forward(self, codes: Tensor) -> Tensor:
        return self.head(self.rnn(self.token(codes))[0])


@healthy()
def lstm_on_text() -> Fit:
    """An LSTM on source text, clipped as usual."""
    return reads_text(CharLSTM(), adam(5e-3), gradient_clip_val=1.0)


@healthy()
def gru_on_text() -> Fit:
    """A GRU on source text."""
    return reads_text(CharLSTM(nn.GRU), adam(5e-3))


@healthy()
def recurrent_net_with_memory() -> Fit:
    """A ReLU RNN started at the identity recalls a symbol over 30 steps (Le et al. 2015)."""
    rnn = nn.RNN(5, 32, batch_first=True, nonlinearity="relu")
    nn.init.eye_(rnn.weight_hh_l0)
    nn.init.zeros_(rnn.bias_hh_l0)
    net = Last(rnn, 32, 4)
    steps = first_symbol(202, 32, 30)
    held = (torch.cat([x for x, _ in steps[200:]]), torch.cat([y for _, y in steps[200:]]))
    return Fit(Learner(net, classify, adam(2e-3)), steps[:200], mistakes(net, held), {"gradient_clip_val": 1.0})


@healthy()
def dilated_convolutions_on_text() -> Fit:
    """Causal dilated convolutions with residuals, as in a temporal convolutional net."""

    class Causal(nn.Module):
        def __init__(self, dilation: int) -> None:
            super().__init__()
            self.conv, self.pad = nn.Conv1d(32, 32, 2, dilation=dilation), dilation

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(self.conv(F.pad(x, (self.pad, 0))))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token = nn.Embedding(BYTES, 32)
            self.stages = nn.Sequential(*(Residual(Causal(2**n)) for n in range(4)))
            self.head = nn.Linear(32, BYTES)

        def forward(self, codes: Tensor) -> Tensor:
            return self.head(self.stages(self.token(codes).transpose(1, 2)).transpose(1, 2))

    return reads_text(Net(), adam(5e-3))


class Bag(nn.Module):
    """The mean of a snippet's embeddings, and a guess at the next code."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.head = nn.Embedding(5000, 32, sparse=True), nn.Linear(32, BYTES)

    def forward(self, codes: Tensor) -> Tensor:
        pairs = (31 * codes[:, :-1] + codes[:, 1:]) % 5000
        return self.head(self.token(pairs))


class TwoKinds(Learner):
    """SparseAdam for the embedding and Adam for the rest, by manual optimization."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        sparse = torch.optim.SparseAdam([self.net.token.weight], lr=1e-2)
        return [sparse, torch.optim.Adam(self.net.head.parameters(), lr=5e-3)]

    def training_step(self, batch: Pair, batch_idx: int) -> Any:
        both = self.optimizers()
        for optimizer in both:
            optimizer.zero_grad()
        loss, _ = classify(self.net, (batch[0], batch[1][:, 1:]))
        self.manual_backward(loss)
        for optimizer in both:
            optimizer.step()
        return {"loss": loss.detach()}


@healthy()
def sparse_embeddings() -> Fit:
    """Sparse gradients for an embedding of 5,000 rows, of which a batch touches a few hundred; two optimizers."""
    net = Bag()
    held = [(x, y[:, 1:]) for x, y in snippets(2, 32, 24, held_out=True)]
    return Fit(TwoKinds(net), snippets(200, 32, 24), surprise(net, held))


class Experts(nn.Module):
    """Eight experts, of which a router picks one for each example; `favour` makes some rare."""

    def __init__(self, width: int = 48, count: int = 8) -> None:
        super().__init__()
        self.stem, self.router = nn.Linear(PIXELS, width), nn.Linear(width, count)
        with torch.no_grad():
            self.router.bias.copy_(torch.linspace(0.5, -1.5, count))
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(count))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem(x))
        weights, choice = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            chosen = choice == number
            if bool(chosen.any()):
                out[chosen] = weights[chosen, None] * expert(x[chosen])
        return self.head(x + out)


@healthy(quick=True)
def mixture_with_rare_experts() -> Fit:
    """Switch-style experts (Fedus et al. 2021): a rare one gets no gradient for many steps."""
    return reads_digits(Experts(), adam(3e-3), steps=200)


class ManyHeads(nn.Module):
    """One trunk and five heads, each for its own pair of digits."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = mlp(2, outputs=32)
        self.heads = nn.ModuleList(nn.Linear(32, 2) for _ in range(5))
        self.turn = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.heads[self.turn](torch.relu(self.trunk(x)))


@healthy()
def alternating_heads() -> Fit:
    """Five tasks take turns of eight steps: at any step four heads do not run."""
    learn, held = flat_digits()
    net = ManyHeads()
    batches = []
    for step in range(200):
        task = step // 8 % 5
        mine = learn[1] // 2 == task
        ((inputs, labels),) = draw((learn[0][mine], learn[1][mine] % 2), 1, 32)
        batches.append((inputs, labels, task))

    def objective(net: Any, batch: tuple[Tensor, Tensor, int]) -> tuple[Tensor, Tensor | None]:
        net.turn = batch[2]
        logits = net(batch[0])
        return F.cross_entropy(logits, batch[1]), accuracy(logits, batch[1])

    mine = held[1] // 2 == 4
    measure = mistakes(net, (held[0][mine], held[1][mine] % 2))

    def yardstick() -> float:
        net.turn = 4
        return measure()

    return Fit(Learner(net, objective, adam(3e-3)), batches, yardstick)


@healthy()
def unused_rows_of_an_embedding() -> Fit:
    """A vocabulary of 2,000 of which the text uses a hundred: the other rows have a gradient of exactly zero."""
    net = GPT()
    net.token = nn.Embedding(2000, 32)
    return reads_text(net, adam(3e-3))


class Graph(nn.Module):
    """Two graph convolutions over the grid of a digit's pixels (Kipf and Welling 2017)."""

    def __init__(self) -> None:
        super().__init__()
        places = torch.cartesian_prod(torch.arange(8.0), torch.arange(8.0))
        near = ((places[:, None] - places).abs().sum(-1) <= 1).float()
        self.register_buffer("mix", near / near.sum(-1, keepdim=True))
        self.place = nn.Parameter(0.5 * torch.randn(64, 8))
        self.first, self.second, self.head = nn.Linear(9, 32), nn.Linear(32, 32), nn.Linear(32 * 64, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        nodes = torch.cat([x[..., None], self.place.expand(len(x), -1, -1)], dim=-1)
        nodes = torch.relu(self.first(self.mix @ nodes))
        return self.head(torch.relu(self.second(self.mix @ nodes)).flatten(1))


@healthy()
def graph_convolutions() -> Fit:
    """Messages over a grid of pixels, two hops."""
    return reads_digits(Graph(), adam(2e-3))


@healthy()
def deep_set_of_points() -> Fit:
    """The mean of a set of 50 numbers' features tells their spread: the set's size divides the gradient."""

    class Pool(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mean(1)

    net = nn.Sequential(nn.Linear(1, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), Pool(), nn.Linear(32, 1))
    scale = torch.rand(154, 32, 1) + 0.5
    sets = scale[..., None] * torch.randn(154, 32, 50, 1)
    pairs = list(zip(sets, 3 * (scale - 1), strict=True))
    held = (torch.cat([x for x, _ in pairs[150:]]), torch.cat([y for _, y in pairs[150:]]))
    return Fit(Learner(net, regress, adam(3e-3)), pairs[:150], misfit(net, held))


@healthy()
def text_under_sgd() -> Fit:
    """A GPT under SGD with momentum: embeddings of rare codes hardly move."""
    return reads_text(GPT(), sgd(0.1, momentum=0.9), steps=200)
