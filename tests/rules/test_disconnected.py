"""Disconnected and frozen: a faulty run raises the right alert, a healthy one none."""

from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from gradwatch import GradWatch, Watch
from gradwatch.core.alert import Alert, Severity
from gradwatch.core.history import History
from gradwatch.core.record import ROOT, Missing
from gradwatch.rules import Disconnected, Frozen
from models import module_of
from synthetic_history import INF, NAN, append, judge_rows, judge_steps, layout, net, only, record, silent
from training import fit, train

GONE = {"fc1": Missing.NO_GRADIENT}


def test_the_output_projection_of_a_detached_attention_is_not_called_unused() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(8, 2), "head": nn.Linear(8, 1)})

    def loss_of(step: int) -> Tensor:
        x = torch.randn(4, 3, 8)
        return model["head"](model["attention"](x, x, x)[0].detach() + x).mean()

    watch = Watch(model, rules=[Disconnected()], sinks=(), budget=None)
    train(torch.optim.SGD(model.parameters(), lr=0.1), loss_of, watch, steps=30)
    reasons = watch.verdict.untrained_by_reason
    assert reasons["although the attention around it runs"] == ["attention.out_proj.weight", "attention.out_proj.bias"]
    assert "unused (its layer never runs)" not in reasons


def test_a_detached_layer() -> None:
    outcome = judge_rows(Disconnected(), net(4), [{"codes": GONE}] * 5)
    assert silent(outcome[:4])
    found = only(outcome[4])
    assert (found.layer, found.sites) == ("fc1", ("fc1",))
    assert found.message == (
        "Layer fc1 runs in the forward pass and got no gradient in 5 steps: nothing uses the output, or detach(), "
        "torch.no_grad() or an operation without a gradient (argmax, a comparison, .item(), .numpy()) cuts the way to "
        "the loss."
    )
    assert found.remedy == (
        "no detach(), no_grad() or .numpy() between layer fc1 and the loss, which must use its output; for "
        "f(x) such as x > 0, y + (f(x) - y).detach() with y = x.clamp(-1, 1); or requires_grad_(False), if no gradient "
        "is meant."
    )


@pytest.mark.parametrize(
    ("order", "words"),
    [
        (("fc0", "fc2"), "Layer fc1 never runs: 20 steps without a gradient."),
        ((), "Layer fc1 got no gradient in 20 steps: unused in forward, or detached."),
    ],
)
def test_an_unused_layer(order: tuple[str, ...], words: str) -> None:
    outcome = judge_rows(Disconnected(), net(3, order=order), [{"codes": GONE}] * 20)
    assert silent(outcome[:19])
    found = only(outcome[19])
    assert found.message == words
    out = "leave its parameters out of the optimizer in configure_optimizers."
    assert found.remedy == f"call layer fc1 in forward, or {out}"


def test_parameters_of_a_module_of_which_another_method_than_forward_is_called() -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mask, self.inner = nn.Parameter(torch.zeros(8)), nn.Linear(8, 8)

        def encode(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)  # type: ignore[no-any-return]

    class Net(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self[1](self[0].encode(x))  # type: ignore[no-any-return]

    alert = zero_gradients_of(Net(Encoder(), nn.Linear(8, 1)))
    assert (alert.severity, alert.sites) == ("warning", ("0.mask",))
    assert alert.message.startswith(
        "Parameter 0.mask got no gradient in 20 steps, while others of the module did: forward does not use it, or"
    )


def test_parameters_of_the_lightning_module_itself() -> None:
    """Lightning calls `training_step`, not `forward`: the module does not run, but what it holds does."""
    module, watch = module_of(nn.Linear(8, 1), lambda net, x, _: net(x).square().mean(), lr=0.1), GradWatch(sinks=[])
    module.mask = nn.Parameter(torch.zeros(8))
    fit(module, watch, data=DataLoader(torch.randn(240, 8), batch_size=8), max_epochs=1)  # type: ignore[arg-type]
    (alert,) = watch.alerts
    assert (alert.severity, alert.sites) == ("warning", ("mask",))
    assert alert.message.startswith("Parameter mask got no gradient in 20 steps, while others of the module did:")


def test_an_unused_parameter_of_the_model_itself() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    model.mask = nn.Parameter(torch.zeros(8))
    alert = zero_gradients_of(model)
    assert (alert.severity, alert.sites) == ("warning", ("mask",))
    assert alert.message.startswith("Parameter mask got no gradient in 20 steps, while others of the module did:")


def test_a_layer_that_a_library_does_not_use_is_a_notice() -> None:
    """With which options it would, its user has not written; layers below a part that no one calls are the user's."""
    names = ["vae.z", "vae.l.0", "vae.l.1", "vae.own", "other.0", "head"]
    libraries = dict.fromkeys(("vae", "vae.z", "vae.l.0", "vae.l.1"), "scvi") | {"other": "timm", "other.0": "timm"}
    known = replace(layout(names, order=["vae.z", "head"]), libraries=libraries)
    gone = dict.fromkeys(("vae.l.0", "vae.l.1", "vae.own", "other.0"), Missing.NO_GRADIENT)
    outcome = judge_rows(Disconnected(), History(known), [{"codes": gone}] * 20)
    assert silent(outcome[:19])
    notice, warning = sorted(outcome[19] or (), key=lambda found: found.severity.order)
    assert (notice.severity, notice.sites) == (Severity.NOTICE, ("vae.l.0", "vae.l.1"))
    assert notice.message == (
        "Layers vae.l.0, vae.l.1 never run: 20 steps without a gradient. scvi, whose layers they are, runs without "
        "them."
    )
    assert notice.remedy == "an option of scvi that uses layer vae.l.1, if that should train."
    assert (warning.severity, warning.sites) == (Severity.WARNING, ("vae.own", "other.0"))
    around = History(replace(layout(["vae", "vae.z", "head"], order=["vae.z", "head"]), libraries=libraries))
    gone = dict.fromkeys(("vae", "vae.weight", "vae.bias"), Missing.NO_GRADIENT)
    notice = only(judge_rows(Disconnected(), around, [{"codes": gone}] * 20)[19])
    assert (notice.severity, notice.sites) == (Severity.NOTICE, ("vae.weight", "vae.bias"))
    whole = History(replace(layout([ROOT, "z"], order=["z"]), libraries={"": "scvi", "z": "scvi"}))
    gone = dict.fromkeys((ROOT, f"{ROOT}.weight", f"{ROOT}.bias"), Missing.NO_GRADIENT)
    notice = only(judge_rows(Disconnected(), whole, [{"codes": gone}] * 20)[19])
    assert (notice.severity, notice.sites) == (Severity.NOTICE, (f"{ROOT}.weight", f"{ROOT}.bias"))


@pytest.mark.parametrize(("library", "example"), [("some", ""), ("transformers", ", such as add_pooling_layer=False")])
def test_an_output_of_a_library_that_the_loss_does_not_use_is_a_notice(library: str, example: str) -> None:
    """As what BERT pools, where sentences are means of hidden states; a whole model without a gradient is cut off."""
    names, libraries = ["bert.layer", "bert.pooler.dense", "head"], dict.fromkeys(("bert", "bert.layer"), library)
    libraries |= dict.fromkeys(("bert.pooler", "bert.pooler.dense"), library)
    known, gone = replace(layout(names), libraries=libraries), {"bert.pooler.dense": Missing.NO_GRADIENT}
    outcome = judge_rows(Disconnected(), History(known), [{"codes": gone}] * 5)
    assert silent(outcome[:4])
    notice = only(outcome[4])
    assert (notice.severity, notice.sites) == (Severity.NOTICE, ("bert.pooler.dense",))
    assert notice.message == (
        "Layer bert.pooler.dense runs in the forward pass and got no gradient in 5 steps, while others of the module "
        f"did: most often {library}, whose layer it is, gives several outputs, and the loss uses others."
    )
    assert notice.remedy == (
        f"an option of {library} that leaves it out{example}; or a loss that uses the output of layer "
        "bert.pooler.dense, if that should train."
    )
    cut = {"bert.layer": Missing.NO_GRADIENT}  # what comes later in the same module trains
    warning = only(judge_rows(Disconnected(), History(known), [{"codes": cut}] * 5)[4])
    assert (warning.severity, warning.sites) == (Severity.WARNING, ("bert.layer",))
    gone |= cut
    warning = only(judge_rows(Disconnected(), History(known), [{"codes": gone}] * 5)[4])
    assert (warning.severity, warning.sites) == (Severity.WARNING, ("bert.layer", "bert.pooler.dense"))


@pytest.mark.parametrize("fed", [True, False])
def test_an_output_of_a_library_beside_others_that_run_later_is_a_notice(fed: bool) -> None:
    """As what totalVI gives for a likelihood that it does not have; what follows a cut gets nothing from before it."""
    names, libraries = ["encoder", "vae.dropout", "vae.mean", "head"], ("vae", "vae.dropout", "vae.mean")
    edges = ((1, 3), (3, 4), (4, 0)) if fed else ((3, 4), (4, 0))
    known = replace(layout(names), libraries=dict.fromkeys(libraries, "scvi"), edges=edges)
    rows = [{"codes": {"vae.dropout": Missing.NO_GRADIENT}}] * 5
    found = only(judge_rows(Disconnected(), History(known), rows)[4])
    assert (found.severity, found.sites) == (Severity.NOTICE if fed else Severity.WARNING, ("vae.dropout",))
    assert ("gives several outputs, and the loss uses others." in found.message) is fed


def test_a_parameter_that_a_library_has_no_use_for_is_a_notice() -> None:
    """A layer of its own that leaves out a parameter, as a wavelet that has fewer than others."""
    known = replace(layout(["wave", "own"]), libraries={"wave": "some"})
    gone = dict.fromkeys(("wave.weight", "own.weight"), Missing.NO_GRADIENT)
    warning, notice = judge_rows(Disconnected(), History(known), [{"codes": gone}] * 20)[19] or ()
    assert (warning.severity, warning.sites) == (Severity.WARNING, ("own.weight",))
    assert (notice.severity, notice.sites) == (Severity.NOTICE, ("wave.weight",))
    assert notice.headline == "some or the loss has no use for it"
    assert notice.message == (
        "Parameter wave.weight got no gradient in 20 steps, while others of the module did: some, whose parameter "
        "it is, has no use for it, or the loss has none."
    )
    assert notice.remedy == "an option of some that uses wave.weight, if that should train."


def test_a_library_that_weighs_a_single_variable_is_a_notice() -> None:
    """A softmax of one number is 1, whatever the layers before it give."""
    names = ["tft.vsn.lin", "tft.vsn.out", "tft.vsn.value", "head"]
    libraries = dict.fromkeys(("tft", "tft.vsn", *names[:3]), "some")
    shape = layout(names)
    one = tuple(s._replace(numel=1) if s.name == "tft.vsn.out.bias" else s for s in shape.sites)
    rows = [{"gradients": [0.0, 0.0, 1.0, 1.0]}] * 20
    found = only(judge_steps(Disconnected(), History(replace(shape, sites=one, libraries=libraries)), rows)[19])
    assert (found.severity, found.sites) == (Severity.NOTICE, ("tft.vsn.lin", "tft.vsn.out"))
    assert found.message == (
        "The gradient of layers tft.vsn.lin, tft.vsn.out was exactly 0 at each of 20 steps, while others beside them "
        "had one: most often some, whose layers they are, takes a softmax of the one number that layer tft.vsn.out "
        "gives, as of a single variable."
    )
    assert found.remedy == "more variables, if some should weigh them; otherwise none."
    for known in (replace(shape, libraries=libraries), replace(shape, sites=one)):
        found = only(judge_steps(Disconnected(), History(known), rows)[19])
        assert found.severity == Severity.WARNING


@pytest.mark.parametrize("queries", ["dit.attn.to_q", "dit.attn.to_q.lora_A", "dit.attn.add_q_proj"])
def test_queries_of_a_library_without_effect_are_a_notice(queries: str) -> None:
    """As of a single token, or in the last block of a diffusion transformer, which gives out no text."""
    names = ["dit.norm", queries, "dit.attn.to_k", "dit.attn.add_k_proj", "dit.out"]
    rows = [{"gradients": [0.0, 0.0, 1.0, 1.0, 1.0]}] * 20
    known = replace(layout(names), libraries=dict.fromkeys(("dit", "dit.attn", *names), "some"))
    found = only(judge_steps(Disconnected(), History(known), rows)[19])
    assert (found.severity, found.sites) == (Severity.NOTICE, ("dit.norm", queries))
    assert found.message == (
        f"The gradient of layers dit.norm, {queries} was exactly 0 at each of 20 steps, while others beside them had "
        "one: most often some, whose layers they are, attends to a single token, or to one that a mask leaves, of "
        "which a softmax is 1; or it uses nothing of what these queries find, as the last block of SD3 does."
    )
    end = f"if layer {queries} should train; otherwise none."
    assert found.remedy == f"more than one token to attend to, in the mask too, {end}"
    assert only(judge_steps(Disconnected(), History(layout(names)), rows)[19]).severity == Severity.WARNING


def test_queries_beside_a_layer_of_keys_and_values_are_a_notice() -> None:
    """As where a pyramid of tokens is reduced to a single one."""
    names = ["net.norm", "net.attn.q", "net.attn.kv", "net.out"]
    known = replace(layout(names), libraries=dict.fromkeys(("net", "net.attn", *names), "some"))
    found = only(judge_steps(Disconnected(), History(known), [{"gradients": [1.0, 0.0, 1.0, 1.0]}] * 20)[19])
    assert (found.severity, found.sites) == (Severity.NOTICE, ("net.attn.q",))
    assert "attends to a single token" in found.message


@pytest.mark.slow
def test_rare_experts_have_time() -> None:
    history = History(layout(["experts.0", "experts.1", "head"], order=["experts.0", "head"]))
    outcome = judge_rows(Disconnected(), history, [{"codes": {"experts.1": Missing.NO_GRADIENT}}] * 1000)
    assert silent(outcome[:999])
    found = only(outcome[999])
    assert (found.sites, found.independent) == (("experts.1",), True)
    assert found.message.endswith("If something chooses among them, as a router among experts, it never chooses it.")


@pytest.mark.parametrize("how", ["checkpoint", "no_grad", "detach", "detach, at times"])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
def test_layers_that_run_without_gradients(how: str) -> None:
    """Reentrant checkpointing of a batch, which needs no gradient, is what `torch.no_grad()` is; `detach()` is not."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 1))
            self.runs = 0

        def forward(self, x: Any) -> Any:
            self.runs += 1
            if how == "detach, at times" and self.runs == 5:
                return self.net[3](x)  # at the sample by which the alert is worded, the others do not run
            if how == "checkpoint":
                return self.net[3](checkpoint(self.net[:3], x, use_reentrant=True))
            with torch.set_grad_enabled(how != "no_grad"):
                x = self.net[:3](x)
            return self.net[3](x.detach())

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch = Watch(model, sinks=())
    train(optimizer, lambda _: model(torch.randn(4, 8)).square().mean(), watch, steps=24)
    (alert,) = watch.alerts
    detached = how.startswith("detach")
    assert (alert.step, alert.noticed, alert.layer) == (0, 4 if detached else 19, "net.2")
    assert ("use_reentrant=False" in alert.remedy) == (not detached)
    assert ("no detach()" in alert.remedy) == detached
    assert alert.headline == (
        "no gradient in 5 steps, although they run" if detached else "they run with gradients disabled"
    )


@pytest.mark.parametrize("how", ["none", "zeros", "of one layer"])
@pytest.mark.parametrize("signals", ["auto", "off"])
def test_gradients_that_are_cleared_before_the_step(how: str, signals: Any) -> None:
    """They came, so nothing is cut off from the loss."""
    model = nn.ModuleDict({"body": nn.Linear(8, 8), "head": nn.Linear(8, 1)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Watch(model, sinks=(), signals=signals) as watch:
        for _ in range(24):
            loss = model["head"](model["body"](torch.randn(4, 8)).relu()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            (model["head"] if how == "of one layer" else optimizer).zero_grad(set_to_none=how != "zeros")
            watch.step(optimizer, loss=loss)
            optimizer.step()
    (alert,) = watch.alerts
    assert (alert.layer, alert.step) == ("head", 0)
    assert (alert.sites == ("head",)) == (how == "of one layer")
    assert alert.severity == ("notice" if how == "of one layer" else "warning")
    whose = "its" if how == "of one layer" else "their"
    assert alert.headline == f"{whose} gradient is cleared before the step"
    assert alert.message.endswith("zero_grad(), p.grad = None or a hook clears it in between.")
    assert alert.remedy.startswith("zero_grad() before backward(), not between it and the step;")


def test_layers_before_others_that_train_are_not_cleared_on_purpose() -> None:
    """Unlike the last one, which DINO holds still at first."""
    model = nn.ModuleDict({"body": nn.Linear(8, 8), "head": nn.Linear(8, 1)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Watch(model, sinks=()) as watch:
        for _ in range(24):
            loss = model["head"](model["body"](torch.randn(4, 8)).relu()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            model["body"].zero_grad()
            watch.step(optimizer, loss=loss)
            optimizer.step()
    (alert,) = watch.alerts
    assert (alert.sites, alert.severity) == (("body",), "warning")
    assert alert.headline == "its gradient is cleared before the step"


@pytest.mark.parametrize("cleared", [True, False])
def test_a_gradient_that_may_be_of_the_loss_of_another_optimizer(cleared: bool) -> None:
    """With several optimizers, that a gradient arrives does not say whose loss it is of."""
    torch.manual_seed(0)
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.01) for net in (first, second)]
    with Watch(nn.ModuleList([first, second]), sinks=()) as watch:
        for step in range(48):
            optimizer, x = optimizers[step % 2], torch.randn(4, 8)
            optimizer.zero_grad()
            loss = (second(x) if cleared and step % 2 else first(x) if step % 2 else second(first(x))).square().mean()
            loss.backward()
            if cleared or step % 2 == 0:
                optimizers[1].zero_grad()
            watch.step(optimizer, loss=loss)
            optimizer.step()
    (alert,) = watch.alerts
    assert (alert.sites, alert.severity) == (("1",), "warning")
    assert alert.headline == "a gradient arrives there, and none is left at the step"
    assert alert.message.endswith("clears it in between, or only the loss of another optimizer depends on it.")
    assert alert.remedy.endswith("and for the optimizer of layer 1 a loss that depends on it.")


@pytest.mark.parametrize("how", ["no_grad", "detach"])
@pytest.mark.parametrize("rate", [0.01, 0.0, "once"])
def test_weights_that_are_an_average_of_others_need_no_gradient(how: str, rate: Any) -> None:
    """Those of a teacher that is in the optimizer, too; of one that never moves, or once, it may be a mistake."""
    torch.manual_seed(0)
    student, teacher = nn.Linear(8, 8), nn.Linear(8, 8)
    optimizer = torch.optim.Adam([*student.parameters(), *teacher.parameters()], lr=0.01)

    def loss(_: int) -> torch.Tensor:
        x = torch.randn(16, 8)
        with torch.set_grad_enabled(how != "no_grad"):
            target = teacher(x).detach()
        return (student(x + 0.1) - target).square().mean()

    @torch.no_grad()
    def average(step: int) -> None:
        for mine, other in zip(teacher.parameters(), student.parameters(), strict=True):
            mine.lerp_(other, rate if rate != "once" else float(step == 2))

    watch = Watch(nn.ModuleList([student, teacher]), sinks=())
    train(optimizer, loss, watch, steps=30, before=average)
    assert [alert.sites for alert in watch.alerts] == ([] if rate == 0.01 else [("1",)])
    assert all(
        alert.remedy.partition("; or requires_grad_(False), if no gradient is meant")[1] for alert in watch.alerts
    )


@pytest.mark.parametrize("how", ["average", "copies"])
def test_a_target_network_that_moves_little_or_now_and_then_needs_no_gradient(how: str) -> None:
    """As in BYOL or deep Q-learning, where `Adam(self.parameters())` holds it, too."""
    torch.manual_seed(0)
    online = nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 8))
    model = nn.ModuleList([online, deepcopy(online)])

    def loss(_: int) -> torch.Tensor:
        x = torch.randn(64, 64)
        with torch.no_grad():
            target = 1 + 0.9 * model[1](x)
        return (online(x) - target).square().mean()

    @torch.no_grad()
    def follow(step: int) -> None:
        rate = 0.001 if how == "average" else float(step % 5 == 0)
        for mine, other in zip(model[1].parameters(), online.parameters(), strict=True):
            mine.lerp_(other, rate)

    watch = Watch(model, rules=[Disconnected()], sinks=())
    train(torch.optim.Adam(model.parameters(), lr=1e-4), loss, watch, steps=120, before=follow)
    assert not watch.alerts


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_a_training_step_that_returns_no_loss() -> None:
    def loss_is_lost(net: nn.Module, batch: Any, index: int) -> Any:
        net(batch[0]).square().mean()

    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    data = DataLoader(TensorDataset(torch.randn(48, 4)), batch_size=8)
    fit(module := module_of(net, loss_is_lost, lr=0.1), watch := GradWatch(sinks=[]), data=data)
    (alert,) = watch.alerts
    assert (alert.noticed, alert.sites) == (4, ("net.0", "net.2"))
    assert alert.message == (
        "No watched layer got a gradient in 5 steps: backward() is not called before the step, as where training_step "
        "returns None; or detach(), torch.no_grad() or .item() cuts the loss off from the weights."
    )
    assert alert.remedy == "return the loss from training_step, or loss.backward() before the step."
    assert str(watch.verdict).endswith(
        "Not trained, although its layer runs: " + ", ".join(dict(module.named_parameters()))
    )


@pytest.mark.parametrize("how", ["a copy", "a new tensor"])
def test_a_loss_that_does_not_depend_on_the_model(how: str) -> None:
    """The inner loop of MAML on a copy whose `.data` are changed; a mask that is made differentiable by force."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Watch(model, sinks=()) as watch:
        for _ in range(24):
            inputs = torch.randn(16, 4)
            outputs = (deepcopy(model) if how == "a copy" else model)(inputs)
            if how == "a new tensor":
                outputs = outputs.detach().sign().requires_grad_()
            loss = (outputs - 1).square().mean()
            loss.backward()
            watch.step(optimizer, loss=loss)
            optimizer.step()
    (alert,) = watch.alerts
    steps = 20 if how == "a copy" else 5
    assert alert.headline == f"no gradient in {steps} steps, although there is a loss"
    assert alert.message == (
        f"No watched layer got a gradient in {steps} steps, although there is a loss: most often it does not depend on "
        "their weights, as after detach(), argmax, a comparison, .item() or torch.tensor(), inside torch.no_grad(), or "
        "where a copy of the model makes it; or backward() is not called."
    )
    assert alert.remedy == (
        "a loss that this model makes, not a copy of it, and no detach(), no_grad(), argmax, comparison, .item() or "
        "torch.tensor() on the way; in a loop of your own, loss.backward() before the step."
    )


@pytest.mark.slow
def test_a_layer_that_had_a_gradient_long_ago() -> None:
    """It is dated at the step after that; its units are not dead from the start."""
    rows = [{"gradients": [0, 1, 1]}] * 1001
    found = only(judge_rows(Disconnected(), net(3), [{}] * 7 + rows)[-1])
    assert found.onset == 1001
    assert found.message.endswith("or units that are dead.")
    gone = [{"codes": GONE}] * 1001
    assert only(judge_rows(Disconnected(), net(3), [{}] * 7 + gone)[-1]).onset == 1001


def test_a_layer_whose_gradient_stops() -> None:
    """It is dated at the first step without one, whoever's steps lie between."""
    other = {"codes": dict.fromkeys(("fc0", "fc1", "fc2"), Missing.OTHER_OPTIMIZER), "optimizer": 1}
    for between in ([], [other]):
        rows = [row for row in [{}] * 50 + [{"codes": GONE}] * 100 for row in (row, *between)]
        outcome = judge_rows(Disconnected(), net(3), rows)
        late = len(rows) - 1 - len(between)
        assert silent(outcome[:late])
        found = only(outcome[late])
        assert (found.severity, found.sites, found.value, found.threshold) == (Severity.WARNING, ("fc1",), 100.0, 100.0)
        assert found.onset == late + 1 - 50 * (1 + len(between))
        assert found.headline == "no gradient any more, in 100 steps"
        assert found.message == (
            "Layer fc1 had a gradient at each of 50 steps, and none in the 100 steps since: the loss does not use it "
            "any more, or detach(), torch.no_grad() or another branch of forward cuts the way to it."
        )
        assert found.remedy == (
            "no detach() or no_grad() between layer fc1 and the loss, which must use it; if its training is meant to "
            "end there, requires_grad_(False)."
        )


@pytest.mark.parametrize("history", [net(3), History(layout(["fc0", "fc1", "fc2"]), capacity=256)], ids=["all", "few"])
def test_a_gradient_that_has_stopped_is_reported_for_as_long_as_it_is_away(history: History) -> None:
    """Also when the history no longer has the records with a gradient."""
    gone = 100 + min(Disconnected().rare_records, history.capacity)
    outcome = judge_rows(Disconnected(), history, [{}] * 60 + [{"codes": GONE}] * gone)
    assert silent(outcome[:159])
    assert all(outcome[159:])
    assert all(found.sites == ("fc1",) for found in map(only, outcome[159:]))


def test_what_was_before_the_history_is_no_gradient() -> None:
    """Of a run that is resumed without its history."""
    history = net(3)
    sites = len(history.layout)
    append(history, 500, values={"grad_norm": np.ones(sites)}, scalars={}, codes=np.zeros(sites, dtype=np.int8))
    assert silent(judge_rows(Disconnected(), history, [{}] * 20 + [{"codes": GONE}] * 200))


def test_a_parameter_whose_gradient_stops() -> None:
    gone = [{"codes": {"fc1.bias": Missing.NO_GRADIENT}}]
    found = only(judge_rows(Disconnected(), net(3), gone * 5 + [{}] * 50 + gone * 100)[-1])
    assert found.message.startswith("Parameter fc1.bias had a gradient at each of 50 steps, and none in the 100 steps")
    assert found.remedy.startswith("no detach() or no_grad() between parameter fc1.bias and the loss, which")


def test_heads_that_take_turns() -> None:
    history = History(layout(["body", "heads.0", "heads.1"]))
    away = [{"codes": {f"heads.{head}": Missing.NO_GRADIENT}} for head in (1, 0)]
    assert silent(judge_rows(Disconnected(), history, [{}, *(away[row // 150 % 2] for row in range(900))]))


def test_a_model_whose_gradients_stop() -> None:
    """As where training_step returns None for each loss that is not finite: nothing trains any more."""
    nothing = {"codes": dict.fromkeys(net(3).layout.index, Missing.NO_GRADIENT)}
    outcome = judge_rows(Disconnected(), net(3), [{}] * 7 + [nothing] * 20)
    assert silent(outcome[:26])
    found = only(outcome[26])
    assert (found.sites, found.onset, found.value) == (("fc0", "fc1", "fc2"), 20, 20.0)
    assert found.message.startswith("No watched layer got a gradient in 20 steps: backward() is not called before the")
    assert silent(judge_rows(Disconnected(), net(3), ([{}] * 7 + [nothing] * 19) * 10))
    late = judge_rows(Disconnected(), net(3), [{}] * 5 + [{"codes": GONE}] * 40 + [nothing] * 20)
    assert only(late[-1]).onset == 20, "the model's, not that of the layer that was lost before"
    lenient = judge_rows(Disconnected(unused_records=200), net(3), [{}] * 30 + [nothing] * 200)
    assert silent(lenient[:-1])
    assert "in 200 steps: backward() is not called" in only(lenient[-1]).message


@pytest.mark.parametrize(
    "rows",
    [
        [{}] * 49 + [{"codes": GONE}] * 200,
        [{}] * 30 + [{"codes": GONE}] + [{}] * 49 + [{"codes": GONE}] * 200,
        [{}] * 300 + [{"codes": GONE}] * 99 + [{}],
        [{}] * 300 + [{"codes": {"fc1": Missing.FROZEN}}] * 200,
    ],
    ids=["too few before", "used at times", "it comes back", "frozen on purpose"],
)
def test_a_layer_whose_gradient_may_stop(rows: list[dict[str, Any]]) -> None:
    assert silent(judge_rows(Disconnected(), net(3), rows))


def test_an_unused_parameter_of_a_layer_that_runs() -> None:
    found = only(judge_rows(Disconnected(), net(3), [{"codes": {"fc1.weight": Missing.NO_GRADIENT}}] * 20)[-1])
    assert (found.sites, found.severity) == (("fc1.weight",), Severity.WARNING)
    assert found.message == (
        "Parameter fc1.weight got no gradient in 20 steps, while others of the module did: forward does not use it, or "
        "only its .data or detach(); or the loss does not depend on it, as a derivative does not on a last bias."
    )


def test_a_weight_of_which_only_the_data_are_used() -> None:
    class Net(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self[1](nn.functional.linear(x, self[0].weight.data, self[0].bias))  # type: ignore[no-any-return]

    model = Net(nn.Linear(8, 4), nn.Linear(4, 1))
    watch = Watch(model, rules=[Disconnected()], sinks=())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(optimizer, lambda step: model(torch.randn(16, 8)).square().mean(), watch, steps=30)
    (alert,) = watch.alerts
    assert (alert.sites, alert.severity) == (("0.weight",), Severity.WARNING)
    assert "forward does not use it, or only its .data or detach(); or the loss does not depend on it" in alert.message
    assert alert.remedy == "use 0.weight itself in forward, not its .data or detach(), or remove it."
    assert watch.verdict.untrained == {"0.weight": "although others of its module are"}


@pytest.mark.parametrize("cut", [False, True], ids=["used", "cut off"])
def test_an_unused_parameter_of_a_module_around_layers_that_train(cut: bool) -> None:
    """As a mask that no input has: the output of the module is used, unless layers in it have no gradient either."""
    known = layout(["encoder.layer", "encoder", "encoder.norm"])
    gone = {"encoder": Missing.NO_GRADIENT} | ({"encoder.layer": Missing.NO_GRADIENT} if cut else {})
    found = only(judge_rows(Disconnected(), History(known), [{"codes": gone}] * 20)[-1])
    assert found.sites == (("encoder.layer", "encoder") if cut else ("encoder.weight", "encoder.bias"))
    start = "Layers encoder.layer, encoder run" if cut else "Parameters encoder.weight, encoder.bias got no gradient in"
    assert found.message.startswith(start)


def test_a_bias_on_which_no_derivative_depends_is_a_notice() -> None:
    """As where the gradient of an energy is fitted: nothing is lost by it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 16), nn.SiLU(), nn.Linear(16, 1))
    optimizer, watch = torch.optim.SGD(model.parameters(), lr=0.1), Watch(model, rules=[Disconnected()], sinks=())

    def loss(step: int) -> torch.Tensor:
        x = torch.randn(16, 2, requires_grad=True)
        (force,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return (force + x).square().mean()

    train(optimizer, loss, watch, steps=30)
    (alert,) = watch.alerts
    assert (alert.sites, alert.severity) == (("2.bias",), Severity.NOTICE)


def test_a_layer_that_once_had_a_gradient_is_connected() -> None:
    assert silent(judge_rows(Disconnected(), net(3), [{}, *([{"codes": GONE}] * 300)]))


@pytest.mark.parametrize(("nearest", "found"), [(1e-42, False), (1e-20, True)])
def test_gradients_that_fade_to_zero_are_not_disconnected(nearest: float, found: bool) -> None:
    """Float32 holds nothing smaller: `vanishing` says so."""
    rows = [{"gradients": [0.0, 0.0, nearest, 1e-10, 1.0], "lr": 0.1}] * 20
    assert bool(judge_rows(Disconnected(), net(5), rows)[-1]) == found


def test_a_deep_model_whose_gradients_fade_to_zero_has_one_alert() -> None:
    torch.manual_seed(0)
    layers = [layer for _ in range(110) for layer in (nn.Linear(16, 16), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    watch = Watch(model, sinks=())
    train(optimizer, lambda _: model(torch.randn(16, 16)).square().mean(), watch, steps=21)
    assert (watch.history.series("grad_norm", "0") == 0).all()
    (alert,) = watch.alerts
    assert (alert.rule, alert.sites[0], alert.effects) == ("vanishing", "0", ())
    assert "It fades gradually, by " in alert.message


def test_a_loss_that_is_always_zero() -> None:
    found = only(judge_rows(Disconnected(), net(2), [{"gradients": 0.0, "loss": 0.0}] * 20)[-1])
    assert "at each of 20 steps, and the loss is exactly 0: a loss weight of 0, a mask or padding" in found.message
    assert "nothing, no reward yet, a margin that nothing violates, or targets that CTC cannot align" in found.message
    assert found.remedy == "a loss weight above 0; and a look at targets, rewards, masks and lengths of a batch."
    found = only(judge_rows(Disconnected(), net(2), [{"gradients": [0.0, 1.0], "loss": 0.0}] * 20)[-1])
    assert "the loss is exactly 0" not in found.message


def test_a_cross_entropy_of_one_output_comes_first_among_the_causes() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    watch = Watch(model, rules=[Disconnected()], sinks=())
    classes, optimizer = torch.zeros(16, dtype=torch.long), torch.optim.SGD(model.parameters(), lr=0.1)
    train(optimizer, lambda _: nn.functional.cross_entropy(model(torch.randn(16, 8)), classes), watch, steps=30)
    (alert,) = watch.alerts
    assert "and the loss is exactly 0: a cross entropy of one class, as layer 2 gives one number; or a" in alert.message
    assert alert.remedy.startswith(
        "an output of layer 2 for each class, or F.binary_cross_entropy_with_logits; or a loss weight above 0"
    )


def test_a_gradient_that_was_always_zero() -> None:
    outcome = judge_rows(Disconnected(), net(3), [{"gradients": [0, 1, 1]}] * 20)
    assert silent(outcome[:19])
    found = only(outcome[19])
    assert found.message == (
        "The gradient of layer fc0 was exactly 0 at each of 20 steps: a loss weight of 0, a mask, padding or dropout "
        "that leaves nothing, a hook that makes it 0, an operation without a slope (round, sign, a comparison, a clamp "
        "or an activation in its flat part, a softmax or norm of one number), or units that are dead from the start."
    )
    assert found.remedy == (
        "a weight above 0 for the loss of layer fc0, no dropout or mask that leaves nothing, no clamp of its outputs, "
        "or straight through: x + (round(x) - x).detach()."
    )
    assert (found.onset, found.headline) == (20, "its gradient was exactly 0 at each of 20 steps")


@pytest.mark.parametrize(
    ("signals", "inside"),
    [
        ([1.0, 1.0, 1.0], True),
        ([0.0, 1.0, 1.0], False),
        ([1e-9, 1.0, 1.0], False),  # too small for float16, say
        ([INF, 1.0, 1.0], False),
    ],
)
def test_a_gradient_of_zero_to_which_something_flows_back(signals: list[float], inside: bool) -> None:
    rows = [{"gradients": [0, 1, 1], "signals": signals}] * 10 + [{"gradients": [0, 1, 1]}] * 10
    found = only(judge_rows(Disconnected(), net(3), rows)[-1])
    assert (", while what flowed back to its output was not: a hook that makes it 0, inputs" in found.message) == inside


def zero_gradients_of(model: nn.Sequential, loss_of: Any = lambda y: y.square().mean()) -> Alert:
    """The alert of a training in which some have no gradient above 0."""
    watch = Watch(model, rules=[Disconnected()], sinks=())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dtype = next(model.parameters()).dtype
    train(optimizer, lambda step: loss_of(model(torch.randn(16, 8, dtype=dtype))), watch, steps=30)
    (alert,) = watch.alerts
    return alert


def test_a_hook_that_makes_all_gradients_of_a_layer_0() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    for parameter in model[2].parameters():
        parameter.register_hook(lambda gradient: gradient * 0)
    alert = zero_gradients_of(model)
    assert alert.message == (
        "The gradient of layer 2 was exactly 0 at each of 20 steps, while what flowed back to its output was not: a "
        "hook that makes it 0, inputs that are all 0 or padding, or an operation without a slope inside the layer."
    )
    assert alert.remedy == (
        "without the register_hook or register_post_accumulate_grad_hook on layer 2, or inputs that are not all 0."
    )
    assert alert.headline == "its gradient was exactly 0 at each of 20 steps, unlike what flows back to it"


def fed(inputs: float, *, library: str = "") -> History:
    """Twenty records of two layers, of which the first has `inputs` of that size and no gradient."""
    libraries = dict.fromkeys(("tft", "tft.static", "tft.head"), library) if library else {}
    history = History(replace(layout(["tft.static", "tft.head"]), libraries=libraries))
    values = {
        "grad_norm": np.array([1.0, 0.0, 1.0, 0.0, 0.0, 1.0, 1.0]),
        "input_rms": np.array([1.0, inputs, 1.0, *[NAN] * 4]),
        "signal_norm": np.array([1.0, 1.0, 1.0, *[NAN] * 4]),
    }
    for step in range(20):
        append(history, step, values=values, scalars={"lr": 0.1}, codes=np.zeros(7, dtype=np.int8))
    return history


def test_a_layer_that_a_library_feeds_zeros_is_a_notice() -> None:
    """As a temporal fusion transformer without static covariates does: their context is a tensor of zeros."""
    notice = only(Disconnected()(fed(0.0, library="some")))
    assert (notice.severity, notice.sites) == (Severity.NOTICE, ("tft.static",))
    assert notice.headline == "its inputs were all 0"
    assert notice.message == (
        "The gradient of layer tft.static was exactly 0 at each of 20 steps, as all its inputs were 0: most often "
        "some, whose layer it is, gives it zeros in place of data that it was not given, such as static covariates."
    )
    assert notice.remedy == "data of that kind, if layer tft.static should train; otherwise none."
    assert only(Disconnected()(fed(1.0, library="some"))).severity == Severity.WARNING
    assert only(Disconnected()(fed(0.0))).severity == Severity.WARNING


def test_inputs_that_are_all_0_are_the_cause() -> None:
    class Context(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.context = nn.Linear(8, 8), nn.Linear(4, 8, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.lin(x) + self.context(torch.zeros(len(x), 4))

    alert = zero_gradients_of(nn.Sequential(Context(), nn.Tanh(), nn.Linear(8, 1)))
    assert (alert.severity, alert.sites) == (Severity.WARNING, ("0.context",))
    assert alert.message == (
        "The gradient of layer 0.context was exactly 0 at each of 20 steps, as all its inputs were 0: a mask or "
        "padding that leaves nothing, or a tensor of zeros in place of data."
    )
    assert alert.remedy == "inputs of layer 0.context that are not all 0."


def test_inputs_that_are_all_0_where_nothing_flows_back() -> None:
    """Other inputs would change nothing: the bias, too, has no gradient."""

    class Weighed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.context = nn.Linear(8, 8), nn.Linear(4, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.lin(x) + 0 * self.context(torch.zeros(len(x), 4))

    alert = zero_gradients_of(nn.Sequential(Weighed(), nn.Tanh(), nn.Linear(8, 1)))
    assert alert.sites == ("0.context",)
    assert "was exactly 0 at each of 20 steps: a loss weight of 0, a mask, " in alert.message


@pytest.mark.parametrize("straight", [False, True])
def test_a_weight_that_is_rounded(straight: bool) -> None:
    """As in a training for quantized weights without a straight-through estimator: its bias trains."""

    class Quantized(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            weight = torch.round(self.weight * 8) / 8
            if straight:
                weight = self.weight + (weight - self.weight).detach()
            return nn.functional.linear(x, weight, self.bias)

    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), Quantized(16, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    watch = Watch(model, sinks=())
    train(optimizer, lambda step: model(torch.randn(16, 4)).square().mean(), watch, steps=30)
    assert bool(watch.alerts) != straight
    for alert in watch.alerts:
        assert (alert.rule, alert.severity, alert.step, alert.noticed) == ("disconnected", "warning", 0, 19)
        assert alert.sites == ("2.weight",)
        assert alert.headline == "its gradient was exactly 0 at each of 20 steps, that of its layer's bias was not"
        assert alert.message == (
            "The gradient of parameter 2.weight was exactly 0 at each of 20 steps, while the bias beside it had one: "
            "an operation without a slope (round, sign, a comparison) makes of it what the layer uses; or all inputs "
            "of the layer are 0, or a hook makes it 0."
        )
        assert alert.remedy == (
            "straight through: w + (round(w) - w).detach() for 2.weight; or inputs of its layer that are not all 0."
        )


@pytest.mark.parametrize(
    ("gradients", "inputs", "found"),
    [
        ([0, 1e-2], NAN, True),
        ([0, 1e-2], 0.0, False),  # zeros from outside, as DETR has them
        ([0, 1e-2], None, False),  # inputs are not measured
        ([0, 1e-31], NAN, False),  # so small a gradient of a bias leaves nothing of that of its weight
        ([0, 0], NAN, False),
        ([1e-3, 1e-2], NAN, False),
    ],
)
def test_a_weight_and_a_bias(gradients: list[float], inputs: float | None, found: bool) -> None:
    sites = [*net(2).layout.sites]
    for i, site in enumerate(sites):
        if site.kind == "parameter":
            sites[i] = site._replace(shape=(500,) if site.name.endswith("bias") else (50, 10))
    history = History(replace(net(2).layout, sites=tuple(sites)))
    values = {"grad_norm": np.array([1.0, 1.0, 1.0, 0.5, 0.5, *gradients])}
    if inputs is not None:
        values["input_rms"] = np.array([1.0, 1.0, inputs, *[NAN] * 4])
    outcome = []
    for step in range(20):
        append(history, step, values=values, scalars={"lr": 0.1}, codes=np.zeros(7, dtype=np.int8))
        outcome.append(Disconnected()(history))
    assert silent(outcome[:-1])
    assert bool(outcome[-1]) == found
    append(history, 20, values={"grad_norm": np.ones(7)}, scalars={"lr": 0.1}, codes=np.zeros(7, dtype=np.int8))
    append(history, 21, values=values, scalars={"lr": 0.1}, codes=np.zeros(7, dtype=np.int8))
    assert not Disconnected()(history), "the weight has had a gradient"


class Gated(nn.Module):
    """Adds a product with its weight, times a factor for each output that begins as zero, as LayerScale does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.gamma = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + x @ self.weight * self.gamma


def test_a_factor_beside_a_weight_is_no_bias() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Gated(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with Watch(model, rules=[Disconnected()], sinks=()) as watch:
        for _ in range(30):
            optimizer.zero_grad()
            model(torch.randn(16, 8)).square().mean().backward()
            watch.step(optimizer)
            optimizer.step()
    assert watch.alerts == ()


class LowRank(nn.Module):
    """Adds a product of two factors, both of which begin as zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Parameter(torch.zeros(8, 2)), nn.Parameter(torch.zeros(2, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + x @ self.down @ self.up


def test_two_factors_of_zeros_in_a_layer() -> None:
    torch.manual_seed(0)
    alert = zero_gradients_of(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), LowRank(), nn.Tanh(), nn.Linear(8, 1)))
    assert alert.sites == ("2",)
    assert (
        "while what flowed back to its output was not: all weights there are 0, and of two factors that are 0, each "
        "makes the gradient of the other 0; or a hook that makes it 0"
    ) in alert.message
    assert alert.remedy.startswith("initial weights other than 0 for one of two factors; or without the register_hook")
    single = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 1))
    nn.init.zeros_(single[0].weight).register_hook(torch.zeros_like)  # type: ignore[no-untyped-call]
    assert "two factors" not in zero_gradients_of(single).message


def test_a_frozen_factor_of_zeros_in_a_layer() -> None:
    """As the second factor of LoRA, frozen by mistake."""
    torch.manual_seed(0)
    low_rank = LowRank()
    first, second = low_rank.parameters()
    nn.init.ones_(first)
    second.requires_grad_(False)
    alert = zero_gradients_of(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), low_rank, nn.Tanh(), nn.Linear(8, 1)))
    name = next(name for name, parameter in low_rank.named_parameters() if parameter is second)
    assert alert.sites == ("2",)
    assert (
        f"what flowed back to its output was not: most often as every number in parameter 2.{name} is 0 and frozen "
        "(requires_grad is False), and 0 times a gradient is 0; or a hook makes it 0"
    ) in alert.message
    assert alert.remedy.startswith(f"requires_grad_(True) for parameter 2.{name}, if those are factors; or without the")


def test_two_layers_of_zeros_in_a_row() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4, bias=False), nn.Linear(4, 8, bias=False), nn.Linear(8, 1))
    for layer in model[1:3]:
        nn.init.zeros_(layer.weight)
    alert = zero_gradients_of(model, lambda y: (y - 1).square().mean())
    assert alert.message == (
        "The gradient of layers 0, 1, 2 was exactly 0 at each of 20 steps: all weights of layers 1, 2 are 0, and of "
        "two factors or layers in a row that are 0, each makes the gradient of the other 0."
    )
    assert alert.remedy == "initial weights other than 0 for layer 1."
    assert alert.headline == "their gradient was exactly 0 at each of 20 steps; all weights of layers 1, 2 are 0"


def test_layers_of_zeros_before_an_output_whose_bias_trains() -> None:
    """Of the output, only the weights are named: their gradient is 0 as long as what they multiply is."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 1))
    for layer in (model[2], model[4]):
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)
    alert = zero_gradients_of(model, lambda y: (y - 1).square().mean())
    assert model[4].bias.item() > 0.9
    assert alert.message == (
        "The gradient of layers 0, 2 was exactly 0 at each of 20 steps: all weights of layers 2, 4 are 0, and of two "
        "factors or layers in a row that are 0, each makes the gradient of the other 0."
    )
    assert alert.remedy == "initial weights other than 0 for layer 2."


def test_a_layer_of_zeros_before_others_that_are_not() -> None:
    """Where something else makes the gradient 0, its zeros are no cause, and those behind it have none."""

    class Masked(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 0 * x + 1

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4), Masked(), nn.Linear(4, 1))
    nn.init.zeros_(model[2].weight)
    nn.init.zeros_(model[2].bias)
    alert = zero_gradients_of(model, lambda y: (y - 1).square().mean())
    assert alert.sites == ("0", "2")
    assert "0 at each of 20 steps: a loss weight of 0, a mask, padding or dropout that leaves nothing" in alert.message


def test_adapters_that_are_all_zeros_beside_frozen_layers() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 4, bias=False), nn.Linear(4, 8, bias=False), nn.Linear(8, 1))
    model[2].requires_grad_(False)
    for layer in model[:2]:
        nn.init.zeros_(layer.weight)
    alert = zero_gradients_of(model, lambda y: (y - 1).square().mean())
    assert "all weights of layers 0, 1 are 0, and of two factors or layers in a row" in alert.message
    assert alert.remedy == "initial weights other than 0 for layer 0."


class Adapter(nn.Module):
    """As LoRA's, whose second factor starts at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(8, 4, bias=False), nn.Linear(4, 8)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.up(self.down(x))


def test_adapters_before_frozen_layers_of_zeros() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Adapter(), nn.Tanh(), Adapter(), nn.Linear(8, 1))
    for adapter in (model[1], model[3]):
        adapter.up.requires_grad_(False)
    alert = zero_gradients_of(model)
    assert alert.sites == ("1.down", "3.down")
    assert alert.message == (
        "The gradient of layers 1.down, 3.down was exactly 0 at each of 20 steps: what they give goes to layers 1.up, "
        "3.up, all of whose weights are 0 and frozen (requires_grad is False), and 0 times a gradient is 0."
    )
    assert alert.remedy == "requires_grad_(True) for layers 1.up, 3.up."
    assert alert.headline == (
        "their gradient was exactly 0 at each of 20 steps; all weights of layers 1.up, 3.up are 0 and frozen"
    )


def test_frozen_layers_of_zeros_are_no_cause_where_others_follow_too() -> None:
    class Both(Adapter):
        def __init__(self) -> None:
            super().__init__()
            self.more = nn.Linear(4, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            low = self.down(x)
            return x + self.up(low) + 0 * self.more(low)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Both(), nn.Linear(8, 1))
    model[1].up.requires_grad_(False)
    assert "frozen" not in zero_gradients_of(model).message
    trained = nn.Sequential(nn.Linear(8, 8), Adapter(), nn.Linear(8, 1))
    nn.init.zeros_(trained[1].down.weight)
    assert "frozen" not in zero_gradients_of(trained).message


def test_an_activation_in_its_flat_part_comes_first_among_the_causes() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4), nn.Sigmoid())
    model[2].bias.data.fill_(40.0)
    alert = zero_gradients_of(model)
    assert alert.message.startswith(
        "The gradient of layers 0, 2 was exactly 0 at each of 20 steps: the Sigmoid 3, 100 % of whose outputs lie in "
        "its flat part; or a loss weight of 0, a mask"
    )
    assert alert.remedy.startswith("nn.LayerNorm after layer 2, before the Sigmoid; or a weight above 0 for")


def test_a_relu_of_few_units_that_never_fires_comes_first_among_the_causes() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2), nn.ReLU(), nn.Linear(2, 1))
    model[2].bias.data.fill_(-40.0)
    alert = zero_gradients_of(model)
    assert "0 at each of 20 steps: the ReLU 3, 100 % of whose outputs lie in its flat part; or a loss" in alert.message
    assert alert.remedy.startswith("nn.LeakyReLU after layer 2; or a weight above 0 for")


def test_biases_that_leave_no_unit_alive_are_said_where_no_module_is_the_relu() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    model[2].bias.data.fill_(0.9)
    assert "biases" not in zero_gradients_of(model, lambda y: 0 * y.square().mean()).message
    model[2].bias.data.fill_(-40.0)
    alert = zero_gradients_of(model, lambda y: (torch.relu(y) - 0.5).square().mean())
    assert alert.message.endswith(
        " or units that are dead from the start. The biases of layer 2 make most of its outputs: their root mean "
        "square is 40, that of the outputs 40."
    )
    assert alert.remedy.startswith("nn.init.zeros_ for the bias of layer 2; or a weight above 0 for")


def test_a_norm_whose_squares_overflow_comes_first_among_the_causes() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))
    with torch.no_grad():
        model[2].weight *= 1e22
    alert = zero_gradients_of(model)
    assert " was exactly 0 at each of 20 steps: a norm of the outputs of layer 2, which reach " in alert.message
    assert ": float32 does not hold their squares; or a loss weight of 0" in alert.message
    assert alert.remedy.startswith("smaller weights or inputs of layer 2; or a weight above 0 for")


def test_squares_that_float64_holds_are_no_cause() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    with torch.no_grad():
        model[2].weight *= 1e22
    alert = zero_gradients_of(model, lambda y: 1 + 0 * y.sum())
    assert " was exactly 0 at each of 20 steps: a loss weight of 0" in alert.message


def test_outputs_that_are_clamped() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    model[2].bias.data.fill_(9.0)
    alert = zero_gradients_of(model, lambda y: (y.clamp(0, 1) - 0.5).square().mean())
    assert "a clamp or an activation in its flat part, a softmax or norm of one number" in alert.message
    assert "no clamp of its outputs, no softmax or norm of its one number, or straight through" in alert.remedy


@pytest.mark.parametrize(
    ("layer", "one"),
    [
        (nn.Linear(8, 1, bias=False), True),
        (nn.Conv1d(1, 1, 8, bias=False), True),
        (nn.Linear(8, 2, bias=False), False),
        (nn.ConvTranspose1d(1, 4, 1, bias=False), False),  # the first dimension of its weight is that of its inputs
        (nn.ConvTranspose1d(1, 1, 1), True),
    ],
    ids=str,
)
def test_a_layer_that_gives_one_number(layer: nn.Module, one: bool) -> None:
    """As the scores of an attention, which are often without a bias."""
    alert = zero_gradients_of(nn.Sequential(nn.Linear(8, 8), nn.Unflatten(1, (1, 8)), layer), lambda y: 1 + 0 * y.sum())
    assert ("no softmax or norm of its one number" in alert.remedy) == one


@pytest.mark.parametrize(
    "rows",
    [
        [{"gradients": [0, 1, 1]}] * 10 + [{}] + [{"gradients": [0, 1, 1]}] * 50,
        [{"gradients": [0, 1, 1], "lr": 0.0}] * 50,
        [{"codes": {"fc0": Missing.FROZEN, "fc1": Missing.NO_OPTIMIZER}}] * 50,
        [{"codes": {"fc0": Missing.OTHER_OPTIMIZER}, "optimizer": 0}] * 50,
    ],
    ids=["dead later", "lr still 0", "frozen", "another optimizer's"],
)
def test_disconnected_stays_silent(rows: list[dict[str, Any]]) -> None:
    assert silent(judge_rows(Disconnected(), net(3), rows))


def test_several_kinds_are_several_findings() -> None:
    codes = {"fc1": Missing.NO_GRADIENT, "fc3": Missing.NO_GRADIENT}
    history = net(5, order=("fc0", "fc1", "fc2", "fc4"))
    found = judge_rows(Disconnected(), history, [{"codes": codes, "gradients": [0, 1, 1, 1, 1]}] * 20)[-1]
    assert found is not None
    assert [each.sites for each in found] == [("fc1",), ("fc3",), ("fc0",)]


OUTSIDE = {"fc0": Missing.NO_OPTIMIZER}


def test_a_layer_in_no_optimizer() -> None:
    outcome = judge_rows(Frozen(), net(3), [{"codes": OUTSIDE, "signals": 1.0}] * 10)
    assert silent(outcome[:9])
    found = only(outcome[9])
    assert (found.severity, found.sites) == (Severity.WARNING, ("fc0",))
    assert found.message == (
        "Layer fc0 is trainable (requires_grad is True) but in no optimizer that GradWatch has seen, and keeps its "
        "values unless something else changes them."
    )
    assert (found.onset, found.headline) == (10, "it is trainable, but in no known optimizer")
    assert found.remedy == (
        "pass self.parameters() to the optimizer in configure_optimizers, once all layers are there; or "
        "requires_grad_(False) where no gradient is meant to change it, as in a teacher that is an average."
    )


@pytest.mark.parametrize("step", [1, 17, 90])
def test_what_left_its_optimizer_had_learnt(step: int) -> None:
    rows = [{"signals": 1.0}] * step + [{"codes": OUTSIDE, "signals": 1.0}] * 12
    outcome = judge_rows(Frozen(), net(3), rows)
    assert [one[0].onset for one in outcome if one] == [10, 11, 12]
    assert "and keeps its values unless something else changes them." in only(outcome[-1]).message


def test_an_optimizer_that_becomes_known_late() -> None:
    """Between samples, too, it is then known that nothing is amiss."""
    outside, inside = {"codes": OUTSIDE, "signals": 1.0}, {"signals": None}
    outcome = judge_rows(Frozen(), net(3), [*[outside] * 9, *[inside] * 15])
    assert silent(outcome)
    assert outcome[10:] == [[]] * 14


@pytest.mark.parametrize("kept", [False, True])
def test_what_an_optimizer_holds_now_is_over_between_samples(kept: bool) -> None:
    """Where nothing was seen to stand still, there is nothing to wait for."""
    outside = [{"codes": OUTSIDE, "signals": 1.0, "updates": [NAN, 1e-3, 0.0 if kept else 1e-3]}] * 40
    outcome = judge_steps(Frozen(), net(3), [*outside, *[{}] * 30])
    assert outcome[39]
    assert outcome[42:] == [None if kept else []] * 28


def watched(*, extra: bool = False, by_hand: bool = False, turns: bool = False) -> Watch:
    """Of a plain loop of 200 steps, in which the optimizer of the body alone is known at first.

    The head is trained by an `extra` optimizer that GradWatch never sees, or `by_hand`, or by one that takes `turns`
    with the other, 50 steps each.
    """
    torch.manual_seed(0)
    body, head = nn.Linear(8, 8), nn.Linear(8, 1)
    model, start = nn.Sequential(body, nn.Tanh(), head), head.weight.detach().clone()
    first, second = (torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (body, head))
    with Watch(model, sinks=()) as watch:
        for step in range(200):
            model.zero_grad()
            inputs = torch.randn(16, 8)
            (loss := (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()).backward()
            optimizer = second if turns and step // 50 % 2 else first
            watch.step(optimizer, loss=loss)
            optimizer.step()
            if extra:
                second.step()
            if by_hand:
                with torch.no_grad():
                    for parameter in head.parameters():
                        parameter -= 0.1 * parameter.grad
    assert not torch.equal(head.weight, start)
    return watch


@pytest.mark.parametrize("how", ["extra", "by_hand"])
def test_nothing_is_said_of_weights_that_something_else_may_change(how: str) -> None:
    (alert,) = watched(**{how: True}).alerts
    assert (alert.rule, alert.sites) == ("frozen", ("2",))
    assert alert.message == (
        "Layer 2 is trainable (requires_grad is True) but in no optimizer that GradWatch has seen, and keeps its "
        "values unless something else changes them."
    )
    assert alert.remedy == (
        "pass model.parameters() to the optimizer, and every optimizer to watch.step(), once all layers are there; or "
        "requires_grad_(False) where no gradient is meant to change it, as in a teacher that is an average."
    )


def test_it_is_over_once_another_optimizer_trains_it() -> None:
    (alert,) = watched(turns=True).alerts
    assert (alert.rule, alert.sites, alert.noticed, alert.closed_step) == ("frozen", ("2",), 9, 49)


def test_layers_in_no_optimizer_that_have_replaced_others() -> None:
    outside, lost = (
        {"codes": dict.fromkeys(["fc0", "fc1"], code)} for code in (Missing.NO_OPTIMIZER, Missing.NO_GRADIENT)
    )
    rows = [{**row, "signals": 1.0} for row in [{}, *[lost] * 4, *[outside] * 10]]
    found = only(judge_rows(Frozen(), net(3), rows)[-1])
    assert found.message.startswith("Layers fc0, fc1 are trainable (requires_grad is True) but in no optimizer that")
    assert found.message.endswith(" has seen, and keep their values unless something else changes them.")
    assert (found.onset, found.headline.partition(": ")[2]) == (14, "what it has replaced is in one")


def test_an_optimizer_that_never_steps_where_epochs_are_not_known() -> None:
    history, row = net(3), {"codes": {"fc0": Missing.OTHER_OPTIMIZER}, "signals": 1.0}
    for _ in range(999):
        record(history, **row)
    assert not Frozen()(history)
    record(history, **row)
    assert "not seen to step in 1000 steps of others" in only(Frozen()(history)).message


def test_a_parameter_in_no_optimizer() -> None:
    found = only(judge_rows(Frozen(), net(3), [{"codes": {"fc1.bias": Missing.NO_OPTIMIZER}, "signals": 1.0}] * 10)[-1])
    assert found.message.startswith("Parameter fc1.bias is trainable")


def test_what_has_left_the_model_hides_nothing() -> None:
    """Its signals end, at the ends of the model too, where samples are counted by."""
    left = {"fc2": Missing.UNMEASURABLE}
    rows = [{"codes": {**left, **OUTSIDE}, "signals": [1, 1, NAN]}] * 10
    assert only(judge_rows(Frozen(), net(3), rows)[-1]).sites == ("fc0",)


def test_what_has_left_the_model_is_passed_over() -> None:
    left = {f"fc{i}": Missing.UNMEASURABLE for i in (0, 1, 2, 5)}
    for rule in (Frozen(), Disconnected()):
        assert silent(judge_rows(rule, net(6), [{}] * 5 + [{"codes": left, "signals": [NAN] * 3 + [1, 1, NAN]}] * 60))


def test_what_has_left_is_not_among_those_that_train() -> None:
    """One of two that are there is off, not one of four: that is on purpose."""
    codes = {"fc0": Missing.UNMEASURABLE, "fc3": Missing.UNMEASURABLE, "fc1": Missing.FROZEN}
    assert silent(judge_rows(Frozen(), net(4), [{"codes": codes}] * 60))


def test_frozen_stays_silent_on_purpose() -> None:
    assert silent(judge_rows(Frozen(), net(3), [{"codes": {"fc0": Missing.FROZEN}, "signals": 1.0}] * 30))
    target_network = {"codes": OUTSIDE, "signals": [NAN, 1, 1]}
    assert silent(judge_rows(Frozen(), net(3), [target_network] * 30))
    assert only(judge_rows(Frozen(), net(3), [{"codes": OUTSIDE}] * 10)[-1]).severity is Severity.NOTICE
