"""Bad heads and tampered gradients: faulty trainings raise the right alerts, healthy ones none."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import quick
from gradwatch import GradWatch, Watch
from gradwatch.core.alert import Alert
from gradwatch.core.schedule import SamplingSchedule
from gradwatch.interventions import Intervention, Scale
from gradwatch.measure.modules.loss_head import bounded_output, head_faults
from gradwatch.measure.modules.recomputed_gradients import bias_of, count_other_hooks
from gradwatch.rules.bad_head import BadHead
from gradwatch.rules.tampered import Tampered
from models import mlp, module_of
from synthetic_history import append, net, only
from training import fit

CLASSES = 5


def classes(x: Tensor) -> Tensor:
    return (x[:, :CLASSES].abs().argmax(1) + x[:, 5].long().clamp(0, 1)) % CLASSES


Loss = Callable[[nn.Module, Tensor], Tensor]


def crossed(model: nn.Module, x: Tensor) -> Tensor:
    return F.cross_entropy(model(x), classes(x))


def watched(
    model: nn.Module,
    loss: Loss = crossed,
    *,
    steps: int = 25,
    lr: float = 0.05,
    micro: int = 1,
    inputs: Callable[[], Tensor] = lambda: torch.randn(32, 8),
    after: Callable[[], object] = lambda: None,
    autocast: bool = False,
    scale: float = 1.0,
    optimizer: torch.optim.Optimizer | None = None,
    reported: bool = True,
    interventions: Sequence[Intervention] = (),
) -> tuple[Alert, ...]:
    """The incidents of a training in a loop of one's own; `after` is called between backward and step."""
    torch.manual_seed(1)
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=lr)
    rules = [Tampered(), BadHead()]
    with Watch(model, rules=rules, interventions=interventions, budget=0.99, sinks=()) as watch:
        for _ in range(steps):
            optimizer.zero_grad()
            for _ in range(micro):
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    value = loss(model, inputs()) * scale / micro
                value.backward()
            after()
            watch.step(optimizer, loss=value if reported else None)
            optimizer.step()
    assert watch.verdict.notes == ()
    measured = watch.history.statistics()
    assert "gradient_cosine" in measured or not any(key.endswith("bias") for key, _ in model.named_parameters())
    return watch.alerts


def fitted(model: nn.Module, loss: Loss, **options: Any) -> tuple[Alert, ...]:
    """The incidents of a training in a Trainer, which knows the loss's graph."""
    torch.manual_seed(1)
    watch = GradWatch(rules=[Tampered(), BadHead()], sinks=())
    module = module_of(model, lambda net, batch, index: loss(net, batch[0]), lr=0.05)
    fit(module, watch, data=DataLoader(TensorDataset(torch.randn(320, 8)), batch_size=32), **options)
    assert watch.verdict.notes == ()
    return watch.alerts


# ---- bad heads, by the graph


def head() -> Tensor:
    """What a layer with a gradient gives, [6, CLASSES]."""
    return nn.Linear(4, CLASSES)(torch.randn(6, 4))


Y = torch.arange(6) % CLASSES
SOFT = torch.full((6, CLASSES), 1 / CLASSES)


def by_hand(p: Tensor) -> Tensor:
    return -(F.log_softmax(p, 1) * SOFT).sum(1).mean()


BAD = {
    "softmax": lambda z: F.cross_entropy(z.softmax(1), Y),
    "module": lambda z: nn.CrossEntropyLoss()(nn.Softmax(1)(z), Y),
    "smoothed": lambda z: F.cross_entropy(z.softmax(1), Y, label_smoothing=0.1),
    "weighted": lambda z: F.cross_entropy(z.softmax(1), Y, weight=torch.rand(CLASSES)),
    "unreduced": lambda z: (F.cross_entropy(z.softmax(1), Y, reduction="none") * torch.rand(6)).sum(),
    "soft targets": lambda z: F.cross_entropy(z.softmax(1), SOFT),
    "by hand": lambda z: by_hand(z.softmax(1)),
    "divergence": lambda z: F.kl_div(F.log_softmax(z.softmax(1), 1), SOFT, reduction="batchmean"),
    "images": lambda z: F.cross_entropy(z.view(1, 2, 3, CLASSES).movedim(-1, 1).softmax(1), Y.view(1, 2, 3)),
    "sequences": lambda z: F.cross_entropy(z.view(2, 3, -1).softmax(-1).transpose(1, 2), Y.view(2, 3)),
    "flattened": lambda z: F.cross_entropy(z.view(2, 3, -1).softmax(-1).flatten(0, 1), Y),
    "chosen": lambda z: F.cross_entropy(z.softmax(1)[Y > 1], Y[Y > 1]),
    "clamped": lambda z: F.cross_entropy(z.softmax(1).clamp(1e-6, 1), Y),
    "cast": lambda z: F.cross_entropy(z.bfloat16().softmax(1).float(), Y),
    "one of two losses": lambda z: 0.1 * z.square().mean() + F.cross_entropy(z.softmax(1), Y),
    "of many steps": lambda z: torch.stack([F.cross_entropy(z.softmax(1), Y) for _ in range(40)]).sum(),
    "two in one": lambda z: F.cross_entropy(torch.cat([z.softmax(1), (2 * z).softmax(1)]), Y.repeat(2)),
}

BAD_SIGMOIDS = {
    "binary": lambda z: F.binary_cross_entropy_with_logits(z.sigmoid(), SOFT),
    "module": lambda z: nn.BCEWithLogitsLoss()(nn.Sigmoid()(z), SOFT),
    "squeezed": lambda z: F.binary_cross_entropy_with_logits(z.sigmoid()[:, 0], SOFT[:, 0]),
    "classes": lambda z: F.cross_entropy(z.sigmoid(), Y),
    "dice": lambda z: 1 - (F.logsigmoid(z.sigmoid().view(6, -1)).exp() * SOFT).sum() / (SOFT.sum() + 1),
    "distance": lambda z: (z.sigmoid().sigmoid() - SOFT).abs().mean(),
}

OTHER_DIMENSION = {
    "batch": lambda z: F.nll_loss(F.log_softmax(z, 0), Y),
    "module": lambda z: nn.NLLLoss()(nn.LogSoftmax(0)(z), Y),
    "sequences": lambda z: F.nll_loss(F.log_softmax(z.view(2, 3, -1), 0).view(-1, CLASSES), Y),
    "positions": lambda z: F.nll_loss(F.log_softmax(z.view(2, 3, -1), 1).flatten(0, 1), Y),
    "images": lambda z: F.nll_loss(F.log_softmax(z.view(1, 2, 3, CLASSES).movedim(-1, 1), -1), Y.view(1, 2, 3)),
    "last": lambda z: F.nll_loss(F.log_softmax(z.view(2, 3, -1).transpose(1, 2), -1), Y.view(2, 3)),
}

NO_LOGARITHM = {
    "classes": lambda z: F.nll_loss(z.softmax(1), Y),
    "sequences": lambda z: nn.NLLLoss()(nn.Softmax(-1)(z.view(2, 3, -1)).view(-1, CLASSES), Y),
}

CUT_OFF = {
    "classes": ("softmax_head", lambda z: F.cross_entropy(z.relu(), Y)),
    "module": ("softmax_head", lambda z: nn.NLLLoss()(nn.LogSoftmax(1)(nn.ReLU(inplace=True)(z)), Y)),
    "sequences": ("softmax_head", lambda z: F.cross_entropy(z.view(2, 3, -1).relu().flatten(0, 1), Y)),
    "smoothed": ("softmax_head", lambda z: F.cross_entropy(z.relu(), Y, label_smoothing=0.1)),
    "binary": ("sigmoid_head", lambda z: F.binary_cross_entropy_with_logits(z.relu()[:, 0], SOFT[:, 0])),
}


class LogSoftmax(torch.autograd.Function):
    """One of a user's own, called as torch's."""

    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        return z.log_softmax(1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


SOUND: dict[str, Callable[[Tensor], Tensor]] = {
    "logits": lambda z: F.cross_entropy(z, Y),
    "log probabilities": lambda z: F.nll_loss(z.softmax(1).clamp_min(1e-9).log(), Y),
    "log-softmax of sequences": lambda z: F.nll_loss(F.log_softmax(z.view(2, 3, -1), -1).view(-1, CLASSES), Y),
    "the same, transposed": lambda z: F.nll_loss(F.log_softmax(z.view(2, 3, -1), 2).transpose(1, 2), Y.view(2, 3)),
    "of images": lambda z: F.nll_loss(F.log_softmax(z.view(1, 2, 3, CLASSES).movedim(-1, 1), 1), Y.view(1, 2, 3)),
    "of one example": lambda z: F.nll_loss(F.log_softmax(z[0], -1), Y[0]),
    "of pairs, both ways": lambda z: F.nll_loss(F.log_softmax(z @ z.T, 0).T, torch.arange(6)),
    "maps that are averaged": lambda z: F.cross_entropy(z.unsqueeze(2).relu().mean(2), Y),
    "hidden units": lambda z: F.cross_entropy(nn.Linear(CLASSES, CLASSES)(z.relu()), Y),
    "features of a teacher": lambda z: F.kl_div(z.relu().log_softmax(1), SOFT, reduction="batchmean"),
    "part of a sum": lambda z: F.cross_entropy(z.relu() - (-z).relu(), Y),
    "log-softmax twice": lambda z: F.cross_entropy(F.log_softmax(z, 1), Y),
    "log of softmax": lambda z: F.cross_entropy(z.softmax(1).log(), Y),
    "squared error": lambda z: F.mse_loss(z.softmax(1), SOFT),
    "distillation": lambda z: F.kl_div(F.log_softmax(z / 4, 1), (z.detach() / 4).softmax(1), reduction="batchmean"),
    "taught by one that learns": lambda z: F.cross_entropy(z, (z / 2).softmax(1)),
    "both ways": lambda z: F.nll_loss(F.log_softmax(z @ z.T, 0), torch.arange(6)),
    "of one's own": lambda z: F.nll_loss(LogSoftmax.apply(z), Y),
    "focal, of probabilities": lambda z: -(F.nll_loss(z.softmax(1), Y, reduction="none") + 1).square().mean(),
    "its logarithm": lambda z: -(-F.nll_loss(z.softmax(1), Y, reduction="none")).log().mean(),
    "focal": lambda z: ((1 - z.softmax(1)[:, :1]) * F.cross_entropy(z, Y, reduction="none")).mean(),
    "policy": lambda z: -torch.distributions.Categorical(probs=z.softmax(1)).log_prob(Y).mean(),
    "attention": lambda z: F.cross_entropy(z.softmax(1) @ torch.randn(CLASSES, CLASSES), Y),
    "gated": lambda z: F.cross_entropy(z * z.softmax(1), Y),
    "experts": lambda z: F.cross_entropy((z.softmax(1).unsqueeze(2) * torch.randn(6, CLASSES, 3)).sum(1), Y % 3),
    "scaled cosine": lambda z: F.cross_entropy(20 * F.normalize(z, dim=1), Y),
    "softmax times a scale": lambda z: F.cross_entropy(16 * z.softmax(1), Y),
    "Gumbel": lambda z: F.cross_entropy(F.gumbel_softmax(z, hard=True) @ torch.randn(CLASSES, CLASSES), Y),
    "binary": lambda z: F.binary_cross_entropy(z.sigmoid(), SOFT),
    "binary logits": lambda z: F.binary_cross_entropy_with_logits(z, SOFT),
    "swish": lambda z: F.binary_cross_entropy_with_logits(z * z.sigmoid(), SOFT),
    "ranked scores": lambda z: -(F.log_softmax(z.sigmoid(), 1) * SOFT).sum(),
}


@pytest.mark.parametrize("loss", BAD)
def test_a_softmax_before_a_softmax_is_seen_in_the_graph(loss: str) -> None:
    found = head_faults(BAD[loss](head()))
    assert {(squash.statistic, squash.value) for squash in found} == {("softmax_head", 1.0)}


@pytest.mark.parametrize("loss", OTHER_DIMENSION)
def test_a_log_softmax_over_what_are_no_classes_is_seen_in_the_graph(loss: str) -> None:
    found = head_faults(OTHER_DIMENSION[loss](head()))
    assert [(squash.statistic, squash.value, len(squash.parameters)) for squash in found] == [("softmax_head", 3.0, 2)]


@pytest.mark.parametrize("loss", NO_LOGARITHM)
def test_a_softmax_in_place_of_a_log_softmax_is_seen_in_the_graph(loss: str) -> None:
    found = head_faults(NO_LOGARITHM[loss](head()))
    assert [(squash.statistic, squash.value, len(squash.parameters)) for squash in found] == [("softmax_head", 4.0, 2)]


@pytest.mark.parametrize("loss", CUT_OFF)
def test_a_relu_after_logits_is_seen_in_the_graph(loss: str) -> None:
    statistic, of = CUT_OFF[loss]
    found = head_faults(of(head()))
    assert [(squash.statistic, squash.value, len(squash.parameters)) for squash in found] == [(statistic, 6.0, 2)]


Z = torch.zeros(6, CLASSES)
BOUNDED: dict[str, tuple[float, Callable[[Tensor], Tensor]]] = {
    "squares": (4, lambda z: F.mse_loss(z.tanh(), Z)),
    "unreduced": (4, lambda z: F.mse_loss(nn.Tanh()(z), Z, reduction="none").mean()),
    "by hand": (4, lambda z: ((z.tanh() - Z) ** 2).mean()),
    "square": (1, lambda z: (Z - z.sigmoid()).square().mean()),
    "distances": (2, lambda z: F.l1_loss(z.tanh().view(-1), Z.view(-1))),
    "by hand, distances": (1, lambda z: (z.softmax(1) - Z).abs().mean()),
    "Huber": (2, lambda z: F.smooth_l1_loss(z.tanh(), Z)),
}
UNBOUNDED: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda z: F.mse_loss(z.tanh(), Z, reduction="sum"),
    "mean of a sum": lambda z: F.mse_loss(z.tanh(), Z, reduction="sum").mean(),
    "multiplied": lambda z: 10 * F.mse_loss(z.tanh(), Z),
    "divided": lambda z: F.mse_loss(z.tanh(), Z) / 0.01,
    "nine times the targets": lambda z: torch.sub(z.tanh(), Z, alpha=9).square().mean(),
    "scaled": lambda z: F.mse_loss(100 * z.tanh(), Z),
    "linear": lambda z: F.mse_loss(z, Z),
    "two terms": lambda z: F.mse_loss(z.tanh(), Z) + z.square().mean(),
    "a power of each": lambda z: (z.tanh() - Z).pow(torch.arange(1.0, CLASSES + 1)).mean(),
    "powers of two": lambda z: (2 ** (z.tanh() - Z)).mean(),
    "cubes": lambda z: ((z.tanh() - Z) ** 4).mean(),
    "both learn": lambda z: F.mse_loss(z.tanh(), 5 * z),
    "no loss": lambda z: z.tanh().mean(),
    "inverse": lambda z: torch.ones(()) / F.mse_loss(z.tanh(), Z),
    "classes": lambda z: F.cross_entropy(z.tanh(), Y),
}


@pytest.mark.parametrize("loss", BOUNDED)
def test_a_bounded_output_before_a_loss_is_seen_in_the_graph(loss: str) -> None:
    most, of = BOUNDED[loss]
    for found in (bounded_output(of(head())), bounded_output(of(head()) / 4, divided=True)):
        assert found is not None
        assert (found[0], len(found[1])) == (most, 2)


@pytest.mark.parametrize("loss", UNBOUNDED)
def test_losses_that_are_not_of_a_bounded_output_alone(loss: str) -> None:
    whole = UNBOUNDED[loss](head())
    whole.backward()
    assert bounded_output(whole) is None, "of a graph that is freed, too"
    assert bounded_output(UNBOUNDED[loss](head()) / 4, divided=True) is None


def binary(targets: Any, **options: Any) -> Tensor:
    """A binary cross entropy with logits of an output [6, CLASSES] and `targets`, with a gradient."""
    return F.binary_cross_entropy_with_logits(head(), torch.zeros(6, CLASSES) + targets, **options)


MASKS, NOT_255 = torch.tensor([0.0, 0, 0, 0, 255]), torch.tensor([1.0, 1, 1, 1, 0])
TARGETS: dict[str, tuple[float, Callable[[], Tensor]]] = {
    "masks of 255": (255, lambda: binary(MASKS)),
    "summed": (255, lambda: binary(MASKS, reduction="sum")),
    "weighted positives": (255, lambda: binary(MASKS, pos_weight=torch.full((CLASSES,), 3.0))),
    "one of two terms": (255, lambda: head().square().mean() + 0.5 * binary(MASKS)),
    "whitened": (-2, lambda: binary(torch.tensor([-2.0, -0.4, 0, 1, 2.8]))),
    "half": (255, lambda: F.binary_cross_entropy_with_logits(head().bfloat16(), MASKS.bfloat16().expand(6, -1))),
    "that learn": (255, lambda: binary(MASKS.clone().requires_grad_())),
    "soft": (1, lambda: binary(torch.tensor([0.05, 0.5, 0.9, 1, 0.2]))),
}


@pytest.mark.parametrize("loss", TARGETS)
def test_targets_of_a_binary_cross_entropy(loss: str) -> None:
    farthest, of = TARGETS[loss]
    targets: list[tuple[Tensor, frozenset[int]]] = []
    assert head_faults(of(), targets) == []
    ((value, near),) = targets
    assert (float(value), len(near), value.requires_grad) == (farthest, 2, False)


class BinaryCrossEntropyWithLogits(torch.autograd.Function):
    """One of a user's own, called as torch's."""

    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        return z.mean()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.expand(6, CLASSES)


UNKNOWN_TARGETS: dict[str, Callable[[], Tensor]] = {
    "left out by a mask": lambda: (binary(MASKS, reduction="none") * NOT_255).mean(),
    "left out by weights": lambda: binary(MASKS, weight=NOT_255.expand(6, -1)),
    "none": lambda: F.binary_cross_entropy_with_logits(head()[:0], MASKS.expand(0, -1), reduction="sum"),
    "of a function of one's own": lambda: BinaryCrossEntropyWithLogits.apply(head()),
    "of a checkpoint": lambda: checkpoint(binary, MASKS.clone().requires_grad_(), use_reentrant=False),
}


@pytest.mark.parametrize("loss", UNKNOWN_TARGETS)
def test_targets_that_may_not_count_or_would_have_to_be_computed(loss: str) -> None:
    whole, targets = UNKNOWN_TARGETS[loss](), list[tuple[Tensor, frozenset[int]]]()
    head_faults(whole, targets)
    assert targets == []
    whole.backward()


def test_targets_are_read_without_a_hook_and_not_after_the_graph() -> None:
    targets: list[tuple[Tensor, frozenset[int]]] = []

    def unpack(tensor: Tensor) -> Tensor:
        raise AssertionError("unpacked")

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
        hooked_loss = binary(MASKS)
    head_faults(hooked_loss, targets)
    freed, edited, twice = binary(MASKS), torch.zeros(6, CLASSES), binary(MASKS)
    freed.backward()
    head_faults(freed, targets)
    assert targets == []
    unsound = F.binary_cross_entropy_with_logits(head(), edited)
    edited += MASKS  # torch refuses the backward pass, and that is all
    head_faults(unsound, targets)
    head_faults(twice, targets)
    twice.backward(retain_graph=True)
    head_faults(twice, targets)
    twice.backward()
    assert [float(value) for value, _ in targets] == [255, 255, 255]


@pytest.mark.parametrize("loss", BAD_SIGMOIDS)
def test_a_sigmoid_before_a_sigmoid_is_seen_in_the_graph(loss: str) -> None:
    z = head()
    found = head_faults(BAD_SIGMOIDS[loss](z))
    assert {squash.statistic for squash in found} == {"sigmoid_head"}


@pytest.mark.parametrize("loss", SOUND)
def test_sound_losses_have_sound_graphs(loss: str) -> None:
    assert head_faults(SOUND[loss](head())) == []


def test_the_walk_ends_where_the_model_begins() -> None:
    """An attention over classes, deep in the model, is no business of the loss."""
    inner = nn.Linear(CLASSES, CLASSES)(F.log_softmax(head().softmax(1), 1))
    assert head_faults(F.cross_entropy(inner, Y)) == []
    assert head_faults(torch.zeros(())) == []


def test_a_loss_without_end_is_not_walked_to_its_end() -> None:
    loss = F.cross_entropy(head().softmax(1), Y)
    for _ in range(1000):
        loss = loss + 1
    assert head_faults(loss) == []


class Tail(nn.Module):
    """A norm, a head without a bias, and a function after it."""

    def __init__(self, function: Callable[[Tensor], Tensor], outputs: int = CLASSES) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.norm = nn.Linear(8, 16), nn.LayerNorm(16)
        self.head, self.function = nn.Linear(16, outputs, bias=False), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.head(self.norm(self.body(x))))


@pytest.mark.filterwarnings("ignore::UserWarning:lightning.*")
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_softmax_in_front_of_a_cross_entropy(accumulate: int) -> None:
    alert = only(fitted(Tail(lambda z: z.softmax(1)), crossed, accumulate_grad_batches=accumulate))
    assert (alert.rule, alert.severity, alert.layer) == ("bad_head", "warning", "net.head")
    assert (alert.step, alert.noticed) == (0, 1)
    assert alert.headline == "a softmax goes into a loss that applies a softmax itself"
    assert alert.message == (
        "The output of layer net.head goes through a softmax into a loss that applies a softmax itself, as a "
        "cross entropy does: probabilities, which lie between 0 and 1, are taken for logits. The loss cannot get near "
        "0, and its gradient fades where the model is sure, right or wrong."
    )
    assert alert.remedy == ("the output of layer net.head as it is for the loss, and the softmax for predictions only.")


class Tied(nn.Module):
    """A head that has the weights of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm, self.head = nn.Embedding(8, 16), nn.LayerNorm(16), nn.Linear(16, 8, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.embedding(classes(x)))).softmax(1)


def distance(scale: float) -> Loss:
    """The mean square of what is missing to numbers of about `scale`."""
    return lambda net, x: F.mse_loss(net(x), scale * (1 + 0.1 * x[:, :1].sin()))


def test_targets_out_of_reach_of_a_tanh() -> None:
    alert = only(fitted(Tail(torch.tanh, 1), distance(20.0)))
    assert (alert.rule, alert.layer, alert.step) == ("bad_head", "net.head", 0)
    assert alert.message.startswith(
        "The output of layer net.head goes through a tanh, sigmoid or softmax, and the loss, a mean of squares or "
        "distances from the targets, is "
    )
    assert alert.message.endswith(
        " times the most that it could be if they lay in the range of that, too: not all of them do."
    )
    assert alert.value == pytest.approx(100, rel=0.1)
    assert alert.remedy == (
        "the output of layer net.head as it is for the loss, or targets that are scaled to the range of its function."
    )
    assert fitted(Tail(torch.tanh, 1), distance(0.8)) == ()
    assert fitted(Tail(lambda z: 20 * z.tanh(), 1), distance(20.0)) == ()


def marked(targets: Callable[[Tensor], Tensor]) -> Loss:
    """A binary cross entropy, of targets made from whether each number of a batch is above 0."""
    return lambda net, x: F.binary_cross_entropy_with_logits(net(x), targets((x[:, :CLASSES] > 0).float()))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_masks_of_255(accumulate: int) -> None:
    options = {"accumulate_grad_batches": accumulate}
    alert = only(fitted(Tail(nn.Identity()), marked(lambda y: 255 * y), **options))
    assert (alert.rule, alert.severity, alert.layer) == ("bad_head", "warning", "net.head")
    assert (alert.step, alert.noticed, alert.value, alert.threshold) == (0, 1, 255, 1)
    assert alert.headline == "the largest target of its binary cross entropy is 255"
    assert alert.message == (
        "The output of layer net.head goes into a binary cross entropy, which wants targets from 0 to 1, but the "
        "largest is 255. Where a target is outside, the loss goes on falling as the output grows, to below 0: a low "
        "loss is no sign of good predictions."
    )
    assert alert.remedy == "targets from 0 to 1, as targets / 255."
    assert fitted(Tail(nn.Identity()), marked(lambda y: 255 * y / 255), **options) == ()


def test_signs_in_place_of_zeros_and_ones() -> None:
    alert = only(fitted(Tail(nn.Identity()), marked(lambda y: 2 * y - 1)))
    assert (alert.value, alert.threshold, alert.remedy) == (-1, 0, "targets from 0 to 1.")
    assert "the lowest is -1. Where a target is outside, the loss goes on falling as the output falls" in alert.message


@pytest.mark.parametrize(
    "targets",
    [
        lambda y: 0.9 * y + 0.05,
        lambda y: 1.0000001 * y,
        lambda y: 1.0078125 * y.bfloat16(),
        lambda y: 1.23 * y - 0.1,  # a mask that was resized
        lambda y: y / 0 * 0,
    ],
    ids=["smoothed", "rounded", "bfloat16", "resized", "NaN"],
)
def test_targets_that_are_probabilities_up_to_rounding(targets: Callable[[Tensor], Tensor]) -> None:
    assert fitted(Tail(nn.Identity()), marked(targets), max_epochs=1, limit_train_batches=4) == ()


@pytest.mark.parametrize("squeezed", [False, True])
def test_an_output_that_is_broadcast_against_the_targets(squeezed: bool) -> None:
    """Either of them may lack a dimension; what is proposed does for both."""

    def returns(net: nn.Module, x: Tensor) -> Tensor:
        values, targets = net(x), x[:, 0].sin()
        values, targets = (values.squeeze(1), targets[:, None]) if squeezed else (values, targets)
        return (values - targets).square().mean()

    alert = only(fitted(Tail(nn.Identity(), 1), returns))
    assert (alert.rule, alert.layer, alert.step) == ("bad_head", "net.head", 0)
    assert alert.message == (
        "The loss compares each output of layer net.head with all 32 targets of the batch: the shapes of the two "
        "differ, as [32, 1] and [32] do, and are broadcast. What is learnt is the mean of the targets, whatever the "
        "input."
    )
    assert alert.remedy == "targets of the shape of the output of layer net.head: y.view_as(output)."


def chosen(net: nn.Module, x: Tensor) -> Tensor:
    """The negative log-likelihood of what `net` gives for whether the first number of each of `x` is above 0."""
    return F.nll_loss(net(x), (x[:, 0] > 0).long())


def test_a_softmax_before_a_negative_log_likelihood() -> None:
    alert = only(fitted(Tail(lambda z: z.softmax(1)), chosen))
    assert (alert.rule, alert.layer, alert.step) == ("bad_head", "net.head", 0)
    assert alert.message == (
        "The output of layer net.head goes through a softmax into a negative log-likelihood, which wants the logarithm "
        "of probabilities: the gradient fades where the model is sure, right or wrong."
    )
    assert alert.remedy == "F.cross_entropy of the output of layer net.head, or log_softmax in place of the softmax."


def test_a_relu_after_logits() -> None:
    alert = only(fitted(Tail(torch.relu), crossed))
    assert (alert.rule, alert.layer, alert.step) == ("bad_head", "net.head", 0)
    assert alert.message == (
        "The output of layer net.head goes through a ReLU into the log-softmax of a cross entropy: no logit can be "
        "under 0, and a class whose logit is 0 for every example gets no gradient."
    )
    assert alert.remedy == "the output of layer net.head as it is, without the ReLU."
    alert = only(fitted(Tail(torch.relu), lambda net, x: F.binary_cross_entropy_with_logits(net(x), target(x))))
    assert "a loss that applies a sigmoid itself: no probability can be under 0.5, and an output" in alert.message


def test_a_log_softmax_over_the_batch() -> None:
    alert = only(fitted(Tail(lambda z: z.log_softmax(0)), chosen))
    assert (alert.rule, alert.layer, alert.step) == ("bad_head", "net.head", 0)
    assert alert.message == (
        "The output of layer net.head goes through a log-softmax into a negative log-likelihood, but over another "
        "dimension than that of the classes, such as the batch: the probabilities of an example do not add up to 1."
    )
    assert alert.remedy == "F.cross_entropy of the output of layer net.head, or the dim of the classes in log_softmax."


def test_a_softmax_after_a_head_whose_weights_are_those_of_an_embedding() -> None:
    alert = only(watched(Tied()))
    assert (alert.rule, alert.layer) == ("bad_head", "embedding")
    assert alert.message.startswith("The output of the layer that shares the weights of layer embedding goes through a")


@pytest.mark.filterwarnings("ignore::UserWarning:lightning.*")
def test_a_sigmoid_in_front_of_a_loss_with_a_sigmoid() -> None:
    def dice(model: nn.Module, x: Tensor) -> Tensor:
        p, y = F.logsigmoid(model(x)).exp(), (x[:, :CLASSES] > 0).float()
        return 1 - 2 * (p * y).sum() / (p + y).sum()

    alert = only(fitted(nn.Sequential(nn.Linear(8, CLASSES), nn.Sigmoid()), dice))
    assert alert.message.startswith(
        "The output of layer net.0 goes through a sigmoid into a loss that applies a sigmoid itself: probabilities, "
    )
    assert alert.remedy == "the output of layer net.0 as it is for the loss, and the sigmoid for predictions only."


@pytest.mark.filterwarnings("ignore::UserWarning:lightning.*")
def test_a_sigmoid_in_front_of_a_binary_cross_entropy_with_logits() -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(model(x), (x[:, :CLASSES] > 0).float())

    alert = only(fitted(Tail(torch.sigmoid), loss))
    assert (alert.rule, alert.layer) == ("bad_head", "net.head")
    assert "a sigmoid into a loss that applies a sigmoid itself, a binary cross entropy with logits" in alert.message
    assert fitted(Tail(lambda z: z), loss) == ()


@pytest.mark.filterwarnings("ignore::UserWarning:lightning.*")
@pytest.mark.parametrize("function", [lambda z: z, lambda z: z.log_softmax(1), lambda z: 10 * z.tanh()])
def test_sound_heads_in_a_trainer(function: Callable[[Tensor], Tensor]) -> None:
    assert fitted(Tail(function), crossed) == ()


# ---- bad heads, by what flows back


class Own(nn.Module):
    """A cross entropy by hand, from logits, in which no graph shows a log-softmax."""

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        return (z.logsumexp(1) - z.gather(1, y.unsqueeze(1)).squeeze(1)).mean()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_probabilities_taken_for_logits_are_recognized_by_what_flows_back(smoothing: float) -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return F.cross_entropy(model(x), classes(x), label_smoothing=smoothing)

    alert = only(watched(nn.Sequential(mlp(CLASSES), nn.Softmax(dim=-1)), loss, reported=False))
    assert (alert.rule, alert.layer, alert.step, alert.noticed) == ("bad_head", "0.6", 0, 4)
    assert alert.message.startswith(
        "The output of layer 0.6 goes through the Softmax 1 into a loss that applies a softmax"
    )


def test_a_function_in_a_loop_of_ones_own() -> None:
    """The loss is reported after its backward pass."""
    alert = only(watched(mlp(CLASSES), lambda model, x: F.cross_entropy(model(x).softmax(-1), classes(x))))
    assert (alert.rule, alert.layer, alert.step, alert.noticed) == ("bad_head", "6", 0, 1)


def test_whatever_the_loss_is_made_of() -> None:
    own = Own()
    assert only(watched(nn.Sequential(mlp(CLASSES), nn.Softmax(1)), lambda m, x: own(m(x), classes(x)))).layer == "0.6"


def test_an_image_of_probabilities() -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return F.cross_entropy(model(x), (x[:, 0] > 0).long() + (x[:, 1] > 0).long())

    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3, 1), nn.Softmax2d())
    alert = only(watched(model, loss, inputs=lambda: torch.randn(4, 3, 6, 6), reported=False))
    assert (alert.rule, alert.layer) == ("bad_head", "2")


def test_a_sigmoid_taken_for_a_logit() -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(model(x), (x[:, :CLASSES] > 0).float(), pos_weight=torch.tensor(3.0))

    alert = only(watched(nn.Sequential(mlp(CLASSES), nn.Sigmoid()), loss, reported=False))
    assert (alert.rule, alert.layer) == ("bad_head", "0.6")
    assert "into a loss that applies a sigmoid itself, a binary cross entropy with logits: prob" in alert.message


def target(x: Tensor) -> Tensor:
    return F.one_hot(classes(x), CLASSES).float()


PROBABILITIES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "log": lambda p, x: F.nll_loss(p.clamp_min(1e-8).log(), classes(x)),
    "squared": lambda p, x: F.mse_loss(p, target(x)),
    "summed squares": lambda p, x: (p - target(x)).square().sum(),
    "absolute": lambda p, x: F.l1_loss(p, target(x)),
    "hinge": lambda p, x: F.multi_margin_loss(p, classes(x)),
    "focal": lambda p, x: ((1 - p) ** 2 * -p.clamp_min(1e-8).log() * target(x)).sum(1).mean(),
    "reward": lambda p, x: -(p * (target(x) - target(x).mean(1, keepdim=True))).sum(1).mean(),
    "entropy": lambda p, x: F.nll_loss(p.log(), classes(x)) + 0.01 * (p * p.log()).sum(1).mean(),
    "policy": lambda p, x: -torch.distributions.Categorical(probs=p).log_prob(classes(x)).mean(),
    "sharp": lambda p, x: F.cross_entropy(16 * p, classes(x)),
    "log twice": lambda p, x: F.cross_entropy(p.log(), classes(x)),
    "dice": lambda p, x: 1 - (2 * (p * target(x)).sum() / (p.sum() + target(x).sum())),
}


@pytest.mark.parametrize("loss", quick.cases(PROBABILITIES, ("log", "squared", "focal", "reward")))
def test_losses_that_want_probabilities(loss: str) -> None:
    model = nn.Sequential(mlp(CLASSES), nn.Softmax(dim=-1))
    assert watched(model, lambda m, x: PROBABILITIES[loss](m(x), x), lr=0.5, steps=40) == ()


@pytest.mark.parametrize("loss", ["binary", "squared", "unsure"])
def test_losses_that_want_the_probability(loss: str) -> None:
    def value(model: nn.Module, x: Tensor) -> Tensor:
        p, y = model(x), target(x)
        match loss:
            case "binary":
                return F.binary_cross_entropy(p, y)
            case "squared":
                return F.mse_loss(p, y)
        return F.binary_cross_entropy(p, 0.8 * y + 0.1)

    assert watched(nn.Sequential(mlp(CLASSES), nn.Sigmoid()), value, lr=0.5, steps=40) == ()


@pytest.mark.parametrize("loss", ["binary", "cross"])
@pytest.mark.parametrize("number", [20, 2000])
def test_a_binary_cross_entropy_of_a_softmax(loss: str, number: int) -> None:
    """Where there are many classes, log(1 - p) is nearly -p."""

    def value(model: nn.Module, x: Tensor) -> Tensor:
        p, y = model(x), x.argmax(1)
        return F.binary_cross_entropy(p, F.one_hot(y, number).float()) if loss == "binary" else F.cross_entropy(p, y)

    model = nn.Sequential(nn.Linear(20, number), nn.Softmax(dim=1))
    alerts = watched(model, value, inputs=lambda: torch.randn(32, 20), reported=False)
    assert [alert.rule for alert in alerts] == ["bad_head"] * (loss == "cross")


def test_probabilities_that_are_all_1_show_no_loss() -> None:
    """Of raw inputs: what little they differ by is rounding, and so is the gradient's share of it."""

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return F.mse_loss(model(x), target(x))

    model = nn.Sequential(mlp(CLASSES), nn.Sigmoid())
    nn.init.constant_(model[0][6].bias, 16.0)
    assert watched(model, loss, lr=1e-3, inputs=lambda: torch.randn(32, 8)) == ()


class Inside(nn.Module):
    """Attention over places, a gate of experts and a Softmax that a norm follows, by modules."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.key, self.softmax = nn.Linear(2, 16), nn.Linear(16, 16), nn.Softmax(dim=-1)
        self.gate, self.choose = nn.Linear(16, 16), nn.Softmax(dim=-1)
        self.norm, self.sigmoid, self.head = nn.LayerNorm(16), nn.Sigmoid(), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x.view(-1, 4, 2))
        h = h + self.softmax(self.key(h) @ h.transpose(1, 2) / 4) @ h
        h = self.norm(self.choose(self.gate(h)))
        return self.head((h * self.sigmoid(h)).mean(1))


def test_softmaxes_inside_a_model() -> None:
    assert watched(Inside(), steps=40) == ()


# ---- tampered gradients


def hooked(model: nn.Sequential, place: int, hook: Callable[[Tensor], Tensor], *keys: str) -> nn.Sequential:
    for key in keys or ("weight", "bias"):
        getattr(model[place], key).register_hook(hook)
    return model


def test_a_hook_that_turns_the_sign() -> None:
    alert = only(watched(hooked(mlp(CLASSES), 2, torch.neg)))
    assert (alert.rule, alert.severity, alert.layer, alert.sites) == ("tampered", "error", "2", ("2",))
    assert (alert.value, alert.threshold) == (pytest.approx(-1), -0.5)
    assert (alert.step, alert.noticed) == (0, 1)
    assert alert.headline in [f"the gradient of 2.{key}: something turned its sign" for key in ("weight", "bias")]
    assert alert.message == (
        "The gradient of 2.weight is not what flows back through layer 2: something turned its sign. There are 2 "
        "hooks on parameters 2.weight, 2.bias that GradWatch did not set."
    ) or alert.message.startswith(
        "The gradient of 2.bias is not what flows back through layer 2: something turned its sign."
    )
    assert alert.remedy == "without the register_hook or register_post_accumulate_grad_hook on layer 2."


@pytest.mark.parametrize("key", ["weight", "bias"])
def test_a_hook_that_multiplies(key: str) -> None:
    alert = only(watched(hooked(mlp(CLASSES), 2, lambda g: 300 * g, key), lr=1e-4))
    assert (alert.rule, alert.severity, alert.layer) == ("tampered", "warning", "2")
    assert (alert.step, alert.noticed) == (0, 1)
    assert alert.message == (
        f"The gradient of 2.{key} is not what flows back through layer 2: something made it 300 times as large. "
        f"There is 1 hook on parameter 2.{key} that GradWatch did not set."
    )


def test_a_hook_that_keeps_the_signs() -> None:
    alert = only(watched(hooked(mlp(CLASSES), 2, torch.sign, "weight"), lr=1e-4, scale=0.01))
    assert (alert.layer, alert.severity) == ("2", "warning")
    assert "something kept nothing but its signs, and made it" in alert.message


def test_a_hook_that_takes_nearly_all() -> None:
    alert = only(watched(hooked(mlp(CLASSES), 2, lambda g: g / 1000)))
    assert (alert.layer, alert.severity, alert.step, alert.noticed) == ("2", "warning", 0, 4)
    assert (alert.value, alert.threshold) == (pytest.approx(-3, abs=1e-3), -1.5)
    assert "something made it 0.001 times as large. There are 2 hooks on parameters 2.weight, 2.bias " in alert.message


def test_a_hook_after_accumulation() -> None:
    model = mlp(CLASSES)

    def turn(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.neg_()

    for parameter in model[2].parameters():
        parameter.register_post_accumulate_grad_hook(turn)
    alert = only(watched(model))
    assert (alert.layer, alert.severity) == ("2", "error")


@pytest.mark.parametrize("hook", [lambda g: -g.sign() * 1e-2, lambda g: -g.clamp(-1e-2, 1e-2), lambda g: -0.5 * g])
def test_hooks_that_turn_the_sign_and_more(hook: Callable[[Tensor], Tensor]) -> None:
    alert = only(watched(hooked(mlp(CLASSES), 2, hook)))
    assert (alert.layer, alert.severity) == ("2", "error")
    assert "something turned its sign" in alert.message


def test_a_head_of_one_output() -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return F.mse_loss(model(x), x[:, :1])

    assert watched(mlp(1), loss) == ()
    assert only(watched(hooked(mlp(1), 6, torch.neg), loss)).layer == "6"


def test_every_sign_turned() -> None:
    model = mlp(CLASSES)
    for place in (0, 2, 4, 6):
        hooked(model, place, torch.neg)
    assert only(watched(model, steps=8)).sites == ("0", "2", "4", "6")


def test_code_that_writes_gradients() -> None:
    """Without a hook only exact multiples are reported, and after five samples."""
    model = mlp(CLASSES)

    def edit() -> None:
        model[2].bias.grad.mul_(-1)

    alert = only(watched(model, after=edit))
    assert (alert.layer, alert.severity, alert.step, alert.noticed) == ("2", "error", 0, 4)
    assert alert.message.endswith(
        "No hook on it is known; the backward pass of a torch.autograd.Function, or code that writes p.grad, can do so."
    )
    assert alert.remedy == "a look at what writes the gradients of layer 2 before optimizer.step()."


@pytest.fixture
def sampled_throughout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SamplingSchedule, "is_sampled", lambda schedule, index: True)


RANDOM_STEPS = random.Random("hooks").sample(range(8, 60), 3)


@pytest.mark.usefixtures("sampled_throughout")
@pytest.mark.parametrize(
    ("factor", "at"), [*((-1.0, at) for at in RANDOM_STEPS), (1e-3, RANDOM_STEPS[0]), (300.0, RANDOM_STEPS[2])]
)
def test_a_hook_is_dated_to_the_step_at_which_it_is_there(at: int, factor: float) -> None:
    """Up to step 64 every sample looks for it."""
    model, steps = mlp(CLASSES), count()

    def inputs() -> Tensor:
        if next(steps) == at:
            hooked(model, 2, lambda g: factor * g)
        return torch.randn(32, 8)

    alert = only(watched(model, inputs=inputs, steps=at + 30, lr=1e-4))
    assert (alert.rule, alert.layer, alert.step) == ("tampered", "2", at)


@pytest.mark.usefixtures("sampled_throughout")
@pytest.mark.parametrize("at", RANDOM_STEPS)
@pytest.mark.parametrize("module", [True, False])
def test_a_bad_head_is_dated_to_the_step_at_which_it_is_there(at: int, module: bool) -> None:
    steps, soft, model = count(), nn.Softmax(1), nn.Sequential(mlp(CLASSES))
    if module:
        model.append(soft)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        late = next(steps) >= at
        if module:
            return F.cross_entropy(model(x), classes(x)) if late else F.mse_loss(model(x), target(x))
        return F.cross_entropy(model(x).softmax(1) if late else model(x), classes(x))

    alert = only(watched(model, loss, steps=at + 12, reported=not module))
    assert (alert.rule, alert.step) == ("bad_head", at)


class Wrong(torch.autograd.Function):
    """x W^T + b; `sign` is that of the gradients by hand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, sign: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sign = sign
        return x @ weight.T + bias

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (g,), (x, weight) = gradients, ctx.saved_tensors
        return g @ weight, ctx.sign * g.T @ x, ctx.sign * g.sum(0), None


class ByHand(nn.Linear):
    sign = -1.0

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Wrong.apply(x, self.weight, self.bias, self.sign)
        return y


class Bare(nn.Module):
    """The same, of nothing that torch knows."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel, self.bias = nn.Parameter(torch.randn(16, 16) / 4), nn.Parameter(torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Wrong.apply(x, self.kernel, self.bias, -1.0)
        return y


@pytest.mark.parametrize("layer", [lambda: ByHand(16, 16), Bare])
def test_a_backward_pass_with_the_wrong_sign(layer: Callable[[], nn.Module]) -> None:
    model = mlp(CLASSES)
    model[2] = layer()
    alert = only(watched(model))
    assert (alert.layer, alert.severity) == ("2", "error")
    assert "something turned its sign" in alert.message


def test_a_backward_pass_by_hand_that_is_right() -> None:
    model = mlp(CLASSES)
    model[2] = ByHand(16, 16)
    model[2].sign = 1.0
    assert watched(model) == ()


class Scaled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return torch.add(x @ self.weight.T, self.bias, alpha=2.0)


def test_a_bias_that_is_added_with_a_factor_is_not_compared() -> None:
    scaled, linear, x = Scaled(16, 16), nn.Linear(16, 16), torch.randn(4, 16)
    assert bias_of(linear(x).grad_fn, linear) == (linear.bias, -1)
    assert bias_of(scaled(x).grad_fn, scaled) is None
    assert bias_of((2 * scaled(x)).grad_fn, scaled) is None


@pytest.mark.parametrize("norm", [True, False])
def test_a_hook_on_a_convolution(norm: bool) -> None:
    """Before a norm, a bias has no gradient but rounding, and the weight tells."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, padding=1), *([nn.BatchNorm2d(8)] if norm else []), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Conv2d(8, 8, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(32, CLASSES))

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return F.cross_entropy(model(x), classes(x.flatten(1)))

    def inputs() -> Tensor:
        return torch.randn(16, 3, 6, 6)

    assert watched(model, loss, inputs=inputs) == ()
    alert = only(watched(hooked(model, 0, torch.neg), loss, inputs=inputs))
    assert (alert.layer, alert.severity) == ("0", "error")


def every(hook: Callable[[Tensor], Tensor]) -> Callable[[nn.Module], None]:
    def put(model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.register_hook(hook)

    return put


HOOKS: dict[str, Callable[[nn.Module], None]] = {
    "clamped": every(lambda g: g.clamp(-1e-3, 1e-3)),
    "signs of all": every(torch.sign),
    "normalised": every(lambda g: g / (g.norm() + 1e-12)),
    "clipped by norm": every(lambda g: g * (1e-3 / (g.norm() + 1e-6)).clamp(max=1.0)),
    "scaled alike": every(lambda g: 1e-4 * g),
    "noise": every(lambda g: g + 0.01 * torch.randn_like(g)),
    "looked at": every(lambda g: g),
    "masked": lambda model: (
        [p.register_hook(lambda g: g * (torch.arange(g.numel()).view(g.shape) % 4 == 0)) for p in model[2].parameters()]
        and None
    ),
    "a tenth": lambda model: [p.register_hook(lambda g: 0.1 * g) for p in model[0].parameters()] and None,
    "centred": every(lambda g: g - g.mean() if g.ndim > 1 else g),
    "no numbers": every(lambda g: torch.nan_to_num(g)),
}


@pytest.mark.parametrize("hook", quick.cases(HOOKS, ("clamped", "noise", "looked at")))
def test_hooks_that_are_in_order(hook: str) -> None:
    model = mlp(CLASSES)
    HOOKS[hook](model)
    assert watched(model) == ()


class Reversal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return -3 * gradients[0]


class Adversarial(nn.Module):
    """Features, a task, and a domain that is to stay unknown: the reversal may be written in three ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.features, self.task, self.domain = mlp(16, depth=2), nn.Linear(16, CLASSES), nn.Linear(16, 2)
        self.how = how
        if how == "forward hook":
            self.features[-1].register_forward_hook(lambda module, args, output: Reversal.apply(output))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.features(x)
        if self.how == "function":
            return self.task(h), self.domain(Reversal.apply(h))
        if self.how == "hook":
            h.register_hook(lambda g: -300 * g)
        return self.task(h), self.domain(h)


@pytest.mark.parametrize("how", ["function", "hook", "forward hook"])
def test_a_reversal_on_activations(how: str) -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        task, domain = model(x)
        return F.cross_entropy(task, classes(x)) + F.cross_entropy(domain, (x[:, 7] > 0).long())

    assert watched(Adversarial(how), loss, lr=1e-3) == ()


def penalised(model: nn.Module, x: Tensor) -> Tensor:
    return crossed(model, x) + 10 * sum((p.square().sum() for p in model.parameters()), torch.zeros(()))


def twice(model: nn.Module, x: Tensor) -> Tensor:
    return crossed(model, x) + crossed(model, -x)


def outside(model: nn.Module, x: Tensor) -> Tensor:
    """The head's parameters are used once more, and not through the module."""
    last = model.get_submodule("6")
    z = model(x)
    return F.cross_entropy(z, classes(x)) - 5 * F.linear(torch.ones(1, 16), last.weight, last.bias).square().mean()


def gradient_penalty(model: nn.Module, x: Tensor) -> Tensor:
    x = x.requires_grad_()
    z = model(x)
    (slope,) = torch.autograd.grad(z.sum(), x, create_graph=True)
    return F.cross_entropy(z, classes(x.detach())) + slope.square().mean()


def remembered(model: nn.Module, x: Tensor) -> Tensor:
    return F.cross_entropy(checkpoint(model, x, use_reentrant=False), classes(x))


def partly(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        model(x)
    return crossed(model, x) + 0 * model(x).detach().sum()


LOSSES: dict[str, Loss] = {
    "penalised": penalised,
    "twice": twice,
    "outside": outside,
    "gradient penalty": gradient_penalty,
    "checkpointed": remembered,
    "partly without gradient": partly,
}


@pytest.mark.parametrize("loss", LOSSES)
def test_gradients_of_more_than_one_source(loss: str) -> None:
    assert watched(mlp(CLASSES), LOSSES[loss], lr=0.01) == ()


@pytest.mark.parametrize("options", [{"micro": 3}, {"autocast": True}, {"scale": 1e-9}, {"scale": 2.0**16}], ids=str)
def test_ways_to_train(options: dict[str, Any]) -> None:
    lr = 0.01 / options.get("scale", 1.0)
    assert watched(mlp(CLASSES), lr=lr, **options) == ()
    assert only(watched(hooked(mlp(CLASSES), 2, torch.neg), lr=lr / 100, **options)).layer == "2"


@pytest.mark.parametrize(
    ("hook", "only_weights", "strength", "penalty"),
    [
        ("looked at", True, 0.3, Tensor.square),
        ("clamped", False, 5.0, Tensor.abs),
        pytest.param("looked at", False, 0.3, Tensor.abs, marks=pytest.mark.slow),
        pytest.param("clamped", True, 5.0, Tensor.square, marks=pytest.mark.slow),
        pytest.param("clamped", True, 0.3, Tensor.abs, marks=pytest.mark.slow),
    ],
)
def test_a_penalty_beside_hooks(
    hook: str, only_weights: bool, strength: float, penalty: Callable[[Tensor], Tensor]
) -> None:
    """Whole batches, so that the penalty comes to balance the rest."""
    torch.manual_seed(1)
    x = torch.randn(64, 8)
    model = mlp(2)
    HOOKS[hook](model)
    weights = [p for p in model.parameters() if p.ndim > 1]

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        some = weights if only_weights else list(model.parameters())
        return F.cross_entropy(model(x), classes(x) % 2) + strength * sum(
            (penalty(p).sum() for p in some), torch.zeros(())
        )

    assert watched(model, loss, inputs=lambda: x, steps=80, lr=0.1 if strength < 1 else 0.01) == ()


@pytest.mark.filterwarnings("ignore::UserWarning:lightning.*")
def test_a_loss_scale() -> None:
    def plugin() -> MixedPrecision:
        return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0))

    assert fitted(mlp(CLASSES), crossed, plugins=[plugin()]) == ()
    assert only(fitted(hooked(mlp(CLASSES), 2, lambda g: 300 * g), crossed, plugins=[plugin()])).layer == "net.2"


def test_clipping_by_hand() -> None:
    model = mlp(CLASSES)
    assert watched(model, after=lambda: nn.utils.clip_grad_norm_(model.parameters(), 1e-3)) == ()
    assert watched(model, after=lambda: nn.utils.clip_grad_value_(model.parameters(), 1e-3)) == ()


def test_gradients_that_are_never_cleared() -> None:
    """That is another rule's fault."""

    class Keeps(torch.optim.SGD):
        def zero_grad(self, set_to_none: bool = True) -> None: ...

    model = mlp(CLASSES)
    assert watched(model, optimizer=Keeps(model.parameters(), lr=1e-3), steps=40) == ()


def test_what_no_optimizer_holds() -> None:
    """Its gradient is never cleared."""
    model = mlp(CLASSES)
    kept = [p for key, p in model.named_parameters() if not key.startswith("2.")]
    model[2].bias.register_hook(torch.neg)
    assert watched(model, optimizer=torch.optim.SGD(kept, lr=0.01), steps=40) == ()


@pytest.mark.parametrize(
    ("cosines", "dex", "hooks", "found"),
    [
        # a penalty on weights, or on biases, that outweighs the loss, beside hooks that only look
        ([-0.6, 1.0] * 4, [0.0] * 8, 1, ()),
        ([1.0, -0.6] * 4, [0.0] * 8, 1, ()),
        # most have a hook that multiplies: the others are right, and of the biases enough are
        ([1.0] * 8, [2.0] * 5 + [0.0] * 3, [1] * 5 + [0] * 3, ("fc0", "fc1")),
        # half of them: the other half is right, whether those are too large or too small
        ([1.0] * 8, [2.0] * 4 + [0.0] * 4, 0, ("fc0", "fc1")),
        ([1.0] * 8, [-2.0] * 4 + [0.0] * 4, 0, ("fc0", "fc1")),
        # without a hook, the opposite is no penalty where it has the right size
        ([-1.0] + [1.0] * 7, [0.0] * 8, 0, ("fc0",)),
        ([-1.0] + [1.0] * 7, [1.0] + [0.0] * 7, 0, ()),
    ],
)
def test_what_counts_as_tampered(cosines: list[float], dex: list[float], hooks: Any, found: tuple[str, ...]) -> None:
    history = net(4)
    shape = history.layout
    numbers = {"gradient_cosine": cosines, "gradient_dex": dex, "gradient_evenness": 0.8, "other_hooks": hooks}
    for step in range(5):
        values = {name: np.zeros(len(shape)) for name in numbers}
        for name, row in values.items():
            row[shape.parameters] = numbers[name]
        append(history, step, values=values, scalars={}, codes=np.zeros(len(shape), dtype=np.int8))
    assert tuple(site for each in Tampered()(history) or () for site in each.sites) == found


def test_a_bias_that_two_layers_share() -> None:
    model = mlp(CLASSES)
    model[4].bias = model[2].bias
    assert watched(model) == ()
    assert only(watched(hooked(model, 2, torch.neg, "bias"))).layer == "2"


def test_two_optimizers_that_take_turns() -> None:
    torch.manual_seed(0)
    maker, judge = mlp(8), mlp(1)
    both = nn.ModuleDict({"maker": maker, "judge": judge})
    optimizers = [torch.optim.Adam(net.parameters(), lr=1e-3) for net in (maker, judge)]
    with Watch(both, rules=[Tampered()], sinks=(), budget=0.99) as watch:
        for _ in range(40):
            made = maker(torch.randn(32, 8))
            optimizers[0].zero_grad()
            F.softplus(-judge(made)).mean().backward()
            watch.step(optimizers[0])
            optimizers[0].step()
            optimizers[1].zero_grad()
            (F.softplus(judge(made.detach())).mean() + F.softplus(-judge(torch.randn(32, 8))).mean()).backward()
            watch.step(optimizers[1])
            optimizers[1].step()
    assert watch.alerts == ()
    assert watch.verdict.notes == ()


class Many(nn.Module):
    """A layer of every kind with a bias, edited in place and seen through views."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm2 = nn.Conv1d(2, 8, 3, padding=1), nn.BatchNorm1d(8)
        self.up, self.group = nn.ConvTranspose1d(8, 8, 2, stride=2), nn.GroupNorm(2, 8)
        self.dense, self.norm, self.act = nn.Linear(8, 8), nn.LayerNorm(8), nn.ReLU(inplace=True)
        self.instance, self.head = nn.InstanceNorm1d(8, affine=True), nn.Linear(8, CLASSES)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        self.pair = nn.Bilinear(8, 8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.norm2(self.conv(x.view(-1, 2, 4))))
        h = self.instance(self.group(self.up(h)))
        h = self.act(self.dense(h.transpose(1, 2)))
        h = self.act(self.dense(h.contiguous()))
        h = self.norm(self.act(self.normed(h)))
        return self.head(self.pair(h, h)).mean(1)


@pytest.mark.usefixtures("sampled_throughout")
def test_layers_of_every_kind() -> None:
    model = Many()
    with Watch(model, rules=[Tampered()], sinks=(), budget=0.99) as watch:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(6):
            optimizer.zero_grad()
            crossed(model, torch.randn(32, 8)).backward()
            watch.step(optimizer)
            optimizer.step()
    assert watch.alerts == ()
    reported = {site for site in watch.history.sites("gradient_cosine") if site.endswith("bias")}
    assert reported >= {f"{name}.bias" for name in ("norm2", "dense", "norm", "head", "normed")}
    for site in reported:
        assert watch.history.series("gradient_cosine", site).min() > 0.9999
        assert abs(watch.history.series("gradient_dex", site)).max() < 1e-3


def test_hooks_are_counted_without_ours() -> None:
    """Also the guard of the two private places of torch in which hooks live."""
    parameter = nn.Parameter(torch.zeros(3))
    assert count_other_hooks(parameter) == 0
    parameter.register_hook(torch.neg)
    parameter.register_post_accumulate_grad_hook(lambda parameter: None)
    assert count_other_hooks(parameter) == 2
    model = mlp(CLASSES)
    with Watch(model, sinks=()):
        assert [count_other_hooks(parameter) for parameter in model.parameters()] == [0] * 8


def test_what_an_intervention_does_in_hooks_is_no_tampering() -> None:
    assert watched(mlp(CLASSES), interventions=[Scale(0.01, layers="2", at="hook")]) == ()


def test_nothing_is_left() -> None:
    model = hooked(mlp(CLASSES), 2, torch.neg)
    watched(model, steps=3)
    assert [len(p._backward_hooks or ()) for p in model.parameters()] == [0, 0, 1, 1, 0, 0, 0, 0]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_targets_whose_logits_are_masked_may_not_count() -> None:
    logits, targets, found = torch.randn(8, requires_grad=True) * 1, torch.tensor([1.0, 0, -1, 1, 0, 1, -1, 0]), []
    for masked in (torch.where(targets < 0, 0.0, logits), logits.masked_fill(targets < 0, 0.0)):
        head_faults(F.binary_cross_entropy_with_logits(masked, targets), found)
    assert found == []
    head_faults(F.binary_cross_entropy_with_logits(logits, targets), found)
    assert [target.item() for target, _ in found] == [-1]
