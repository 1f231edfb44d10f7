"""Running a batch again: where it is not done, what a copy may and may not touch, and how causes are distinguished."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning as L
from gradwatch import GradWatch
from gradwatch.core.history import NonfiniteOrigin
from gradwatch.engine.batch_replay import run_again
from gradwatch.engine.nan_trace.operations import InputSummary, base, forward
from gradwatch.lightning.model_copy import NoOp, ReadOnlyTrainer
from gradwatch.measure.batch import Batch, version_counters
from gradwatch.measure.random_states import RngState
from training import quiet_trainer

pytestmark = pytest.mark.usefixtures("quiet")


class Model:
    """A net and a loss, run as if on a copy."""

    def __init__(self, module: nn.Module, loss: Any) -> None:
        self.module = module
        self._loss = loss

    def loss(self, data: object, index: int) -> Tensor | None:
        made: Tensor = self._loss(self.module, data)
        return made


def batch_of(data: Any) -> Batch:
    return Batch(0, 0, data, RngState.now(), version_counters(data))


def traced(loss: Any, *, net: nn.Module | None = None, seen: Tensor | None = None) -> NonfiniteOrigin | None:
    """What is found out about `loss(net, inputs [4, 3])`."""
    torch.manual_seed(0)
    net = net or nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    return run_again(Model(net, loss), batch_of(torch.randn(4, 3)), 1.0, seen)


def with_causal_mask(net: nn.Module, x: Tensor) -> Tensor:
    q = net(x)
    return ((q @ q.T) + torch.full((4, 4), float("-inf")).triu(1)).softmax(-1) @ q


@pytest.mark.parametrize(
    "loss",
    [
        lambda net, x: with_causal_mask(net, x).mean(),
        lambda net, x: (net(x) + (x - x).log().clamp(min=-1)).mean(),
        lambda net, x: net(x).mean() + 0 * ((x - x) / (x - x)).nanmean().nan_to_num(),
        lambda net, x: net(x).clamp(min=torch.full((3,), float("-inf"))).mean(),
        lambda net, x: torch.where(x > -9, net(x), float("nan")).mean(),
        lambda net, x: torch.empty(4, 3).copy_(net(x)).mean(),
    ],
)
def test_infinity_that_harms_nothing_is_not_blamed(loss: Any) -> None:
    assert traced(loss) is None


def test_a_mask_is_not_blamed_for_what_came_after_it() -> None:
    found = traced(lambda net, x: torch.log(with_causal_mask(net, x) * 0).mean())
    assert found is not None
    assert "at torch.log in" in found.explanation
    assert found.site == ""


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
@pytest.mark.parametrize(
    ("loss", "operation", "words"),
    [
        (lambda net, x: net(x).exp().exp().exp().exp().exp().mean(), "Tensor.exp", "exponential of"),
        (lambda net, x: (net(x) * 0).reciprocal().mean(), "Tensor.reciprocal", "divided by 0"),
        (lambda net, x: 1 / (net(x) * 0).mean(), "Tensor.rtruediv", "divided by 0"),
        (lambda net, x: net(x).square().neg().sqrt().mean(), "Tensor.sqrt", "negative number"),
        (lambda net, x: (net(x) - 9).log2().mean(), "Tensor.log2", "negative number"),
        (lambda net, x: net(x)[:1].std(0).mean(), "Tensor.std", "single value"),
        (lambda net, x: F.cross_entropy(net(x), torch.full((4,), -100)), "F.cross_entropy", "averages over no value"),
        (
            lambda net, x: F.cross_entropy(net(x), torch.zeros(4, dtype=torch.long), torch.tensor([0.0, 1, 1])),
            "F.cross_entropy",
            "every target is ignored, or has a class weight of 0",
        ),
        (lambda net, x: (net(x * 1e25) * 1e25).square().mean(), "Tensor.square", "more than float32 holds"),
        (lambda net, x: net(x).index_fill(0, torch.tensor([1]), float("nan")).mean(), "Tensor.index_fill", "constant"),
        (lambda net, x: net(x * float("-inf")).mean(), "F.linear", "contains an infinity that is a constant"),
    ],
)
def test_the_cause_is_explained(loss: Any, operation: str, words: str) -> None:
    found = traced(loss)
    assert found is not None
    assert found.source == "forward"
    assert f"at {operation} " in found.explanation
    assert words in found.explanation
    assert "test_batch_replay.py:" in found.explanation


@pytest.mark.parametrize(
    ("loss", "remedy"),
    [
        (lambda net, x: (net(x) * 0 - 0.1).log().mean(), "a look at the formula"),
        (lambda net, x: (net(x) * 0 - 1e-8).log().mean(), "torch.log(x.clamp_min(1e-6))"),
        (lambda net, x: (net(x) * 0 - 0.1).sqrt().mean(), "a look at the formula"),
        (lambda net, x: (net(x) * 0 - 0.1).pow(0.3).mean(), "a look at the formula"),
        (
            lambda net, x: F.ctc_loss(
                net(x).log_softmax(-1)[:2, None],
                torch.ones(1, 4, dtype=torch.long),
                torch.tensor([2]),
                torch.tensor([4]),
            ),
            "nn.CTCLoss(zero_infinity=True)",
        ),
    ],
)
def test_an_epsilon_is_no_remedy_for_a_wrong_formula(loss: Any, remedy: str) -> None:
    found = traced(loss)
    assert found is not None
    assert remedy in found.remedy


@pytest.mark.parametrize(
    ("written", "instead"),
    [
        (float("nan"), "another number than NaN in "),
        (float("-inf"), "a finite number in place of infinity (torch.finfo(x.dtype).min for -inf) in "),
        (float("inf"), "a finite number in place of infinity"),
    ],
)
def test_a_constant_of_the_code_is_explained_by_its_value(written: float, instead: str) -> None:
    trace = traced(lambda net, x: net(x).index_fill(0, torch.tensor([1]), written).mean())
    assert trace is not None
    assert "a constant of the code" in trace.explanation
    assert instead in trace.remedy


class Averages(nn.Module):
    """Takes its moving average off, which a first run of the batch has changed or not."""

    def __init__(self, average: float) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("average", torch.full((3,), average))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        self.average.mul_(0.9).add_(0.1 * y.detach().mean(0))
        return y - self.average


def normed(value: float) -> nn.Sequential:
    norm = nn.BatchNorm1d(3)
    norm.running_var.fill_(value)  # type: ignore[union-attr] # it is there
    return nn.Sequential(nn.Identity(), norm, nn.Linear(3, 3))


@pytest.mark.parametrize("net", [normed, Averages])
def test_buffers_that_the_first_run_spoilt_are_not_blamed(net: Any) -> None:
    found = traced(lambda net, x: net((x - 9).log()).mean(), net=net(float("nan")))
    assert found is not None
    assert found.source == "forward"
    assert "at Tensor.log " in found.explanation


@pytest.mark.parametrize("net", [normed, Averages])
@pytest.mark.parametrize("change", [lambda x: x, lambda x: x.mul_(2), lambda x: x.__itruediv__(2)])
def test_nor_do_they_hide_a_bad_batch(net: Any, change: Any) -> None:
    """Changed in place before it is used, as where images are normalised, too."""
    x = torch.randn(4, 3)
    x[2, 1] = float("inf")
    one = net(float("nan"))
    found = run_again(Model(one, lambda net, x: net(change(x)).mean()), batch_of(x), 1.0, None)
    assert found is not None
    assert found.source == "batch"
    assert "infinity in it, in its example 2" in found.explanation


def test_a_buffer_that_is_changed_in_place_was_bad_before() -> None:
    found = traced(lambda net, x: net(x).mean(), net=Averages(float("nan")))
    assert found is not None
    assert (found.source, found.parameters) == ("weights", ("average",))


def test_a_loss_that_comes_out_otherwise_is_not_believed() -> None:
    assert traced(lambda net, x: (net(x) * 0).log().mean(), seen=torch.tensor(1.0)) is None
    assert traced(lambda net, x: net(x).mean(), seen=torch.tensor(float("nan"))) is None
    assert traced(lambda net, x: net(x).square().mean() * 1e-10, seen=torch.tensor(1e-9)) is None


@pytest.mark.parametrize(
    ("loss", "seen", "finite"),
    [
        (lambda net, x: net(x).square().mean(), 1.0, True),
        (lambda net, x: net(x).square().mean(), 1.1, False),
        (lambda net, x: net(x).square().mean(), 1.001, False),  # what is missing may have been the cause
        (lambda net, x: net[2](net[1](net[0](x).detach())).square().mean(), 1.0, False),  # some get no gradient
        (lambda net, x: net(x).square().mean(), None, False),
        (lambda net, x: net(x).square().mean() * 1e30, 1e30, False),  # the norm of its gradients overflows
        (lambda net, x: net(x).square().mean() + (net(x) * 0).sum().sqrt(), 1.0, False),
    ],
)
def test_gradients_that_are_finite_again_were_changed(loss: Any, seen: float | None, finite: bool) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    usual = net(torch.randn(4, 3)).square().mean().detach()
    found = traced(loss, seen=None if seen is None else usual * seen)
    assert (found is not None and found.source == "gradients") is finite


def test_names_of_operations() -> None:
    names = [
        "torch.Tensor.__rtruediv__",
        "torch.log",
        "SqrtBackward0",
        "torch.Tensor.div_",
        "LinalgVectorNormBackward0",
    ]
    assert [base(name) for name in names] == ["rtruediv", "log", "sqrt", "div", "linalg_vector_norm"]
    fine = InputSummary("float32", 4, (4,), 0.1, 1.0, 0)
    assert "is finite" in forward("torch.erf", [fine], nan=True, dtype="float32").what


def test_a_masked_row_lies_along_the_dim_of_the_softmax() -> None:
    """Which may be a wrong one: then a mask that leaves something in each row is of no use."""
    masked = InputSummary("float32", 16, (4, 4), -1.0, 1.0, 0, masked=6)
    wrong = forward("torch.softmax", [masked], nan=True, dtype="float32")
    assert "a row of its input, along the dim of the softmax, is fully masked" in wrong.what
    assert wrong.remedy.startswith("a softmax over the dim of the keys or classes, with at least one position")
    attention = forward("torch.nn.functional.scaled_dot_product_attention", [masked], nan=True, dtype="float32")
    assert (" dim " in attention.what, " dim " in attention.remedy) == (False, False)


def test_a_line_that_is_in_no_file_is_not_quoted() -> None:
    names: dict[str, Any] = {}
    exec(compile("def loss(net, x):\n    return (net(x) * 0).log().mean()", "<made>", "exec"), names)
    origin = traced(names["loss"])
    assert origin is not None
    assert "(<made>:2)" in origin.explanation


def test_a_bystander_takes_nothing() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.step, self.logger, self.loggers, self.callback_metrics = 3, "a logger", ["a logger"], {"a": 1}

    trainer = Trainer()
    seen: Any = ReadOnlyTrainer(trainer)
    seen.step = 4
    seen.callback_metrics["b"] = 2
    seen.logger.experiment.add_scalar("x", 1)
    with seen.logger.timer() as timer:
        timer["x"] = 1
    assert (seen.step, seen.loggers, list(seen.logger.all()), bool(NoOp())) == (3, [], [], False)
    assert vars(trainer) == {"step": 3, "logger": "a logger", "loggers": ["a logger"], "callback_metrics": {"a": 1}}


class TurnsNan(L.LightningModule):
    """NaN at batch 7, of the loss's own making."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def training_step(self, batch: Any, index: int) -> Any:
        loss = self.layer(batch[0]).square().mean()
        return loss + torch.log(loss * 0) if index == 7 else loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters())


class DividesGradients(TurnsNan):
    """Divides the gradients of `spoilt` by their norm of 0 before each step of the batches 7, in `where`."""

    def __init__(self, where: str = "", spoilt: str = "") -> None:
        super().__init__()
        self.where, self.first = where, nn.Linear(3, 3)
        self.spoilt = [p for name, p in self.named_parameters() if name.startswith(spoilt)]
        self.batch = 0
        if where == "hook":
            for parameter in self.spoilt:
                parameter.register_hook(lambda gradient: gradient * 0 / (self.batch != 7) ** 0.5)

    def training_step(self, batch: Any, index: int) -> Any:
        self.batch = index
        return self.layer(self.first(batch[0])).square().mean()

    def on_after_backward(self) -> None:
        if self.where == "on_after_backward" and self.batch == 7:
            for parameter in self.spoilt:
                parameter.grad.mul_(0).div_(parameter.grad.norm())


class ByHand(TurnsNan):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, index))
        optimizer.step()


class ChangesTheBatch(TurnsNan):
    def training_step(self, batch: Any, index: int) -> Any:
        batch[0].mul_(2)
        return super().training_step(batch, index)


class RaisesTheSecondTime(TurnsNan):
    seen: ClassVar[set[int]] = set()  # of the class: no copy has its own

    def training_step(self, batch: Any, index: int) -> Any:
        if index in self.seen:
            raise RuntimeError("again?")
        self.seen.add(index)
        return super().training_step(batch, index)


class NoCopy(TurnsNan):
    def __init__(self) -> None:
        super().__init__()
        self.stream = (i for i in range(3))


@pytest.mark.parametrize("kind", [TurnsNan, ByHand, ChangesTheBatch, RaisesTheSecondTime, NoCopy])
def test_where_a_batch_cannot_be_run_again_the_alert_is_there_without(kind: type[TurnsNan]) -> None:
    torch.manual_seed(0)
    watch = GradWatch(sinks=[], budget=None)
    trainer = quiet_trainer(watch)
    trainer.fit(kind(), DataLoader(TensorDataset(torch.randn(40, 3)), batch_size=4))
    (alert,) = [alert for alert in watch.alerts if alert.rule == "nonfinite"]
    assert ("torch.log" in alert.message) is (kind is TurnsNan)
    assert "at batch 7" in alert.message
    assert watch.verdict.notes == ()


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("spoilt", ["", "layer."])
@pytest.mark.parametrize("where", ["on_after_backward", "hook"])
def test_gradients_that_the_users_code_spoils_are_not_laid_to_the_backward_pass(
    where: str, spoilt: str, accumulate: int
) -> None:
    """Of several backward passes one that makes finite gradients tells nothing of the others."""
    torch.manual_seed(0)
    watch = GradWatch(sinks=[], budget=None)
    trainer = quiet_trainer(watch, accumulate_grad_batches=accumulate)
    trainer.fit(DividesGradients(where, spoilt), DataLoader(TensorDataset(torch.randn(40, 3)), batch_size=4))
    (alert,) = [alert for alert in watch.alerts if alert.rule == "nonfinite"]
    assert "at batch 7" in alert.message
    said = (
        "the same loss, which is finite, and finite gradients: so most often it comes from code that changes gradients"
    )
    assert (said in alert.message) is (accumulate == 1)
    if accumulate == 1:
        assert alert.layer == (spoilt.strip(".") or "total")
        assert "backward pass" not in alert.message
        assert "norm + 1e-6" in alert.remedy


class RootOfZero(TurnsNan):
    """Its gradient is not finite at batch 7, its loss is."""

    def training_step(self, batch: Any, index: int) -> Any:
        loss = self.layer(batch[0].to(self.layer.weight.dtype)).square().mean()
        return loss + torch.sqrt(loss - loss.detach()) if index == 7 else loss


@pytest.mark.parametrize(
    "options",
    [*({"precision": name} for name in ("bf16-true", "bf16-mixed", "64-true")), {"accumulate_grad_batches": 2}],
)
@pytest.mark.parametrize(("kind", "operation"), [(TurnsNan, "torch.log"), (RootOfZero, "torch.sqrt")])
def test_in_other_precisions_and_when_accumulating(kind: type[TurnsNan], operation: str, options: Any) -> None:
    torch.manual_seed(0)
    watch = GradWatch(sinks=[], budget=None)
    trainer = quiet_trainer(watch, **options)
    trainer.fit(kind(), DataLoader(TensorDataset(torch.randn(40, 3)), batch_size=4))
    (alert,) = [alert for alert in watch.alerts if alert.rule == "nonfinite"]
    assert operation in alert.message
    assert watch.verdict.notes == ()


@pytest.mark.parametrize(
    ("value", "words"),
    [("nan", "the batch has NaN at [0], in its example 1"), ("inf", "infinity at [0]"), ("-inf", ""), ("1", "")],
)
def test_a_batch_that_cannot_be_run_again_is_looked_at(value: str, words: str) -> None:
    """But for -inf, of which masks are made."""
    torch.manual_seed(0)
    inputs = torch.randn(40, 3)
    inputs[7 * 4 + 1, 2] = float(value)
    watch = GradWatch(sinks=[], budget=None)
    trainer = quiet_trainer(watch)
    trainer.fit(ByHand(), DataLoader(TensorDataset(inputs), batch_size=4))
    (alert,) = [alert for alert in watch.alerts if alert.rule == "nonfinite"]
    assert words in alert.message
    assert ("the batch has" in alert.message) is bool(words)


class Graph:
    """A batch of a class of its own, as those of graphs are."""

    def __init__(self, nodes: Tensor) -> None:
        self.parts = {"nodes": nodes}


class OfGraphs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, graph: Graph) -> Tensor:
        found: Tensor = self.layer(graph.parts["nodes"])
        return found


@pytest.mark.parametrize("named", [False, True])
def test_a_batch_of_the_users_own_class_is_looked_into(named: bool) -> None:
    nodes = torch.randn(4, 3)
    nodes[1, 2] = float("nan")
    batch, model = batch_of(Graph(nodes)), Model(OfGraphs(), lambda net, g: (net(graph=g) if named else net(g)).mean())
    found = run_again(model, batch, 1.0, None)
    assert found is not None
    assert (found.source, found.site) == ("batch", "")
    assert found.explanation == "what the batch has at .parts['nodes'] has NaN in it, and the loss is computed from it."
    assert batch.unchanged
    nodes.zero_()
    assert not batch.unchanged


class Shifted(nn.Linear):
    def forward(self, inputs: Tensor, *, shift: Tensor) -> Tensor:
        return super().forward(inputs + shift)


def test_a_module_with_a_named_input_that_is_not_finite_is_not_blamed() -> None:
    shift = torch.tensor(float("nan"))
    assert traced(lambda net, x: net["a"](x, shift=shift).mean(), net=nn.ModuleDict({"a": Shifted(3, 1)})) is None


def test_weights_that_an_unmeasured_step_spoilt_are_not_the_optimizers_fault() -> None:
    torch.manual_seed(0)
    watch = GradWatch(sinks=[], budget=None, every_n_steps=2)
    trainer = quiet_trainer(watch)
    trainer.fit(TurnsNan(), DataLoader(TensorDataset(torch.randn(40, 3)), batch_size=4))
    (alert,) = [alert for alert in watch.alerts if alert.rule == "nonfinite"]
    assert alert.step == 8
    assert alert.layer == "layer"
    assert "any more, since one of the steps before, which were not measured" in alert.message
