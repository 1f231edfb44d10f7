"""Divergence, stalled, collapse and frozen under real trainings: each faulty one has a healthy version beside it."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning as L
import quick
from gradwatch import Clip, GradWatch, Scale
from gradwatch.core.alert import Alert, Severity
from gradwatch.interventions import Intervention
from gradwatch.rules import Collapse, Divergence, Exploding, Frozen, Rule, Spike, Stalled
from gradwatch.watch import Watch
from training import quiet_trainer, train

Make = Callable[[nn.Module], Any]


def mlp(*, norm: bool = False, width: int = 16, depth: int = 3) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Linear(8, width), nn.Tanh()]
    for _ in range(depth - 2):
        layers += [nn.Linear(width, width), *([nn.BatchNorm1d(width)] if norm else []), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(width, 1))


def points(steps: int, *, scale: float = 1.0) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        inputs = torch.randn(32, 8, generator=generator)
        yield inputs, scale * torch.sin(inputs.sum(1, keepdim=True))


def points_loader() -> DataLoader[Any]:
    """The points of 8 batches ten times, in batches of 16."""
    pairs = [pair for inputs, targets in points(8) for pair in zip(inputs, targets, strict=True)]
    return DataLoader(pairs * 10, batch_size=16)  # type: ignore[arg-type]


def incidents_of(
    model: nn.Module,
    optimizer: Any,
    *,
    steps: int = 60,
    loss_of: Callable[[Tensor, Tensor], Tensor] = nn.functional.mse_loss,
    schedule: Any = None,
    clip: float | None = None,
    clips_first: bool = False,
    divides: float | None = None,
    rules: Sequence[Rule] = (Frozen(), Stalled(), Divergence(), Collapse()),
    interventions: Sequence[Intervention] = (),
) -> dict[str, Alert]:
    """What the four rules say of a training: rule name -> its incident. `clips_first`: before the measurement.
    `divides`: by the loss scale that it has put into the loss by hand.
    """
    dtype = next(model.parameters()).dtype
    # without a budget every 25th step is sampled, on any machine
    with Watch(model, rules=rules, sinks=(), budget=None, interventions=interventions) as watch:
        for inputs, targets in points(steps):
            optimizer.zero_grad()
            loss = loss_of(model(inputs.to(dtype)).float(), targets)
            (loss * (divides or 1.0)).backward()
            for parameter in model.parameters() if divides else ():
                parameter.grad /= divides
            if clip is not None and clips_first:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            watch.step(optimizer, loss=loss.detach())
            if clip is not None and not clips_first:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            if schedule is not None:
                schedule.step()
    return {alert.rule: alert for alert in watch.alerts}


class Weighted(L.LightningModule):
    """Two losses weighed by parameters of the module itself, whose `forward` is not called (Kendall et al. 2018)."""

    def __init__(self, *, held: bool, used: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.held, self.used, self.log_vars = held, used, nn.Parameter(torch.zeros(2))
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def training_step(self, batch: Any, index: int) -> Tensor:
        outputs = self.net(batch[0])
        losses = torch.stack([nn.functional.mse_loss(outputs, batch[1]), outputs.square().mean()])
        log_vars = self.log_vars if self.used else self.log_vars.detach()
        return (losses * torch.exp(-log_vars) + log_vars).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam((self if self.held else self.net).parameters(), lr=1e-2)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("held", "used"), [(False, True), (False, False), (True, True)])
def test_a_parameter_of_a_module_that_does_not_run_is_in_no_optimizer(held: bool, used: bool) -> None:
    watch = GradWatch(rules=[Frozen()], sinks=[])
    trainer = quiet_trainer(watch, max_epochs=3, limit_train_batches=20)
    trainer.fit(Weighted(held=held, used=used), points_loader())
    said = [(alert.severity, alert.sites, alert.step, alert.noticed) for alert in watch.alerts]
    assert said == [(Severity.WARNING, ("log_vars",), 0, 9)] * (used and not held)


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_part_is_in_no_optimizer() -> None:
    class Compiled(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 1)
            self.part = torch.compile(nn.Sequential(nn.Linear(16, 16), nn.Tanh()), backend="aot_eager")

        def training_step(self, batch: Any, index: int) -> Tensor:
            return nn.functional.mse_loss(self.last(self.part(self.first(batch[0]))), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam([*self.first.parameters(), *self.last.parameters()], lr=1e-2)

    watch = GradWatch(rules=[Frozen()], sinks=[])
    quiet_trainer(watch, limit_train_batches=20).fit(Compiled(), points_loader())
    assert [(alert.severity, alert.sites) for alert in watch.alerts] == [(Severity.WARNING, ("part.0",))]


@pytest.mark.parametrize("held", [12, 11])
def test_many_optimizers_that_take_turns(held: int) -> None:
    """In a loop of the user's own each is known from its first step on."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), *(nn.Linear(16, 16) for _ in range(10)), nn.Linear(16, 1))
    optimizers = [torch.optim.Adam(layer.parameters(), lr=1e-3) for layer in model[:held]]
    with Watch(model, rules=[Frozen()], sinks=()) as watch:
        for inputs, targets in points(5):
            model.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            for optimizer in optimizers:
                watch.step(optimizer)
                optimizer.step()
    assert [(alert.sites, alert.noticed) for alert in watch.alerts] == [(("11",), 11)] * (held == 11)


class ByHand(L.LightningModule):
    """Two optimizers, of which the second steps where `steps` of the global step says so."""

    def __init__(self, steps: Callable[[int], bool], *, detached: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization, self.steps, self.detached, self.batches = False, steps, detached, 0
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 1)

    def training_step(self, batch: Any, index: int) -> None:
        one, other = self.optimizers()  # type: ignore[misc] # two of them
        one.zero_grad()
        other.zero_grad()
        hidden = torch.tanh(self.first(batch[0]))
        loss = hidden.square().mean() if self.detached else nn.functional.mse_loss(self.second(hidden), batch[1])
        self.manual_backward(loss)
        one.step()
        if self.steps(self.batches):
            other.step()
        self.batches += 1

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.01) for part in (self.first, self.second)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("steps", "options", "found"),
    [
        (lambda batch: False, {}, True),
        (lambda batch: False, {"signals": "off"}, True),
        (lambda batch: batch % 10 == 9, {}, False),
        (lambda batch: batch >= 120, {}, False),  # from the second epoch on
    ],
)
def test_an_optimizer_that_never_steps(steps: Callable[[int], bool], options: Any, found: bool) -> None:
    watch = GradWatch(rules=[Frozen()], sinks=[], **options)
    trainer = quiet_trainer(watch, max_epochs=2, limit_train_batches=120)
    trainer.fit(ByHand(steps, detached=False), points_loader())
    assert [alert.severity for alert in watch.alerts] == [Severity.NOTICE] * found
    if not found:
        assert watch.verdict.untrained == {}
        return
    alert = watch.alerts[0]
    assert (alert.layer, alert.sites, alert.step, alert.noticed) == ("second", ("second",), 0, 219)
    assert alert.message == (
        "Layer second is in an optimizer that was not seen to step in 220 steps of others, and keeps its values unless "
        "something else changes them."
    )
    assert alert.remedy == "optimizer.step() for the optimizer of layer second, unless it is to start later."
    assert alert.closed_step is None
    assert set(watch.verdict.untrained.values()) == {"in an optimizer that was not seen to step"}


@pytest.mark.filterwarnings("ignore")
def test_an_optimizer_whose_steps_lightning_does_not_report_is_not_said_to_be_idle() -> None:
    class Raw(ByHand):
        def optimizers(self, use_pl_optimizer: bool = True) -> Any:
            return [super().optimizers()[0], super().optimizers(use_pl_optimizer=False)[1]]  # type: ignore[index]

    watch = GradWatch(rules=[Frozen()], sinks=[])
    trainer = quiet_trainer(watch, max_epochs=2, limit_train_batches=120)
    trainer.fit(Raw(lambda batch: True, detached=False), points_loader())
    assert watch.alerts == ()
    assert watch.verdict.untrained == {}
    assert "use_pl_optimizer=False" in watch.verdict.notes[0]


@pytest.mark.filterwarnings("ignore")
def test_an_optimizer_that_has_nothing_to_do_need_not_step() -> None:
    watch = GradWatch(rules=[Frozen()], sinks=[])
    trainer = quiet_trainer(watch, max_epochs=2, limit_train_batches=120)
    trainer.fit(ByHand(lambda batch: False, detached=True), points_loader())
    assert watch.alerts == ()


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def sgd(lr: float = 0.05, **more: Any) -> Make:
    return lambda model: torch.optim.SGD(model.parameters(), lr=lr, **more)


def adam(lr: float = 1e-3, **more: Any) -> Make:
    return lambda model: torch.optim.AdamW(model.parameters(), lr=lr, **more)


@pytest.mark.parametrize("make", [adam(3.0), sgd(30.0)])
def test_a_rate_beyond_all_bounds(make: Make) -> None:
    model = mlp()
    found = incidents_of(model, make(model), steps=30)
    assert found["divergence"].severity is Severity.ERROR
    assert found["divergence"].step <= 5
    assert "One step moved the weights of layer" in found["divergence"].message


@pytest.mark.parametrize("exponent", [-6, 6])
def test_divergence_under_adam_whatever_the_scale_of_the_loss(exponent: int) -> None:
    model = mlp()
    factor = 10.0**exponent
    found = incidents_of(model, adam(3.0, eps=0.0)(model), loss_of=lambda x, y: factor * nn.functional.mse_loss(x, y))
    assert found["divergence"].step <= 5


def test_a_schedule_that_jumps() -> None:
    model = mlp()
    optimizer = sgd(0.05)(model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 40, gamma=200)
    alert = incidents_of(model, optimizer, schedule=schedule, steps=80)["divergence"]
    assert 40 <= alert.step <= 50
    assert ", 1 step after the learning rate jumped to 10, 200 times that of the step before" in alert.message


def test_the_wrong_sign() -> None:
    model = mlp()
    loss_of = nn.functional.mse_loss
    alert = incidents_of(model, adam(3e-2)(model), loss_of=lambda x, y: -loss_of(x, y), steps=200)["divergence"]
    assert alert.message.startswith("The loss falls without bound")


def test_the_wrong_sign_where_the_loss_falls_slowly() -> None:
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))

    def negative(logits: Tensor, targets: Tensor) -> Tensor:
        return -nn.functional.binary_cross_entropy_with_logits(logits, (targets > 0).float())

    alert = incidents_of(model, adam(3e-3)(model), loss_of=negative, steps=300)["divergence"]
    assert alert.message.startswith("The loss falls without bound")
    assert alert.closed_step is None


@pytest.mark.parametrize(
    ("make", "options", "cause"),
    [
        (adam(1e-9), {}, "The learning rate is 1e-9."),
        (sgd(), {"clip": 1e-6}, "Clipping leaves 1e-6"),
        (
            sgd(),
            {"clip": 1e-6, "clips_first": True},
            "Clipping before the measurement, or other code after the backward pass, leaves 1e-6 of a gradient of norm",
        ),
        (sgd(), {"interventions": [Scale(1e-5)]}, "The interventions leave"),
        (sgd(), {"interventions": [Clip(1e-5)]}, "The interventions leave"),
        (sgd(), {"interventions": [Scale(0.5)], "clip": 1e-6}, "Clipping leaves 1e-6"),
        (sgd(), {"interventions": [Scale(1e-5, layers="0")], "clip": 1e-6}, "Clipping leaves 1e-6"),
        (sgd(), {"interventions": [Clip(1e-5, dry_run=True)], "clip": 1e-6}, "Clipping leaves 1e-6"),
        (sgd(1e-9), {"divides": 1000.0}, "The learning rate is 1e-9."),
        (sgd(1e-9), {"divides": 2.0**16, "clip": 1.0, "clips_first": True}, "The learning rate is 1e-9."),
        (sgd(1e-9), {"divides": 2.0**16}, "The learning rate is 1e-9."),
        (sgd(), {"loss_of": lambda x, y: 1e-6 * nn.functional.mse_loss(x, y)}, "The gradient is small"),
    ],
)
def test_a_training_that_stands_still(make: Make, options: dict[str, Any], cause: str) -> None:
    model = mlp()
    found = incidents_of(model, make(model), **options)
    assert cause in found["stalled"].message
    assert list(found) == ["stalled"]


def scaled_incidents(
    *,
    unscales: bool = False,
    by_scaler: bool = True,
    given: bool = True,
    clip: float | None = 1.0,
    rate: float = 0.05,
    bad_batch: int = -1,
    scale: float = 2.0**16,
    half: bool = False,
    interventions: Sequence[Intervention] = (),
) -> dict[str, Alert]:
    """Of a training whose loss is scaled; gradients are clipped before the scaler steps. `given`: the scaler, to the
    watch. `half`: in float16.
    """
    model, scaler = mlp(), torch.amp.GradScaler("cpu", init_scale=scale)
    optimizer, rules = sgd(rate)(model), (Stalled(), Divergence(), Spike())
    with Watch(
        model, rules=rules, sinks=(), budget=None, scaler=scaler if given else None, interventions=interventions
    ) as watch:
        for step, (inputs, targets) in enumerate(points(60)):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16, enabled=half):
                outputs = model(inputs)
            loss = nn.functional.mse_loss(outputs.float(), targets * (100 if step == bad_batch else 1))
            scaler.scale(loss).backward()
            if unscales:
                scaler.unscale_(optimizer)
            watch.step(optimizer, loss=loss)
            if by_scaler:
                if clip is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
                scaler.step(optimizer)
            else:
                optimizer.step()
            if by_scaler or unscales:
                scaler.update()
    return {alert.rule: alert for alert in watch.alerts}


def test_clipping_of_scaled_gradients() -> None:
    alert = scaled_incidents()["stalled"]
    assert "Clipping leaves 1.5e-5 of a gradient of norm 0.56 without the loss scale." in alert.message
    assert alert.remedy.endswith(", which is above the norm of the gradient, after scaler.unscale_(optimizer).")
    assert scaled_incidents(unscales=True) == {}


def test_steps_on_scaled_gradients() -> None:
    alert = scaled_incidents(by_scaler=False)["divergence"]
    assert "The optimizer used gradients that still had the loss scale, 65536 times those measured." in alert.message
    assert alert.remedy == "scaler.step(optimizer), which divides by the loss scale, in place of optimizer.step()."
    assert scaled_incidents(unscales=True, by_scaler=False) == {}
    alert = scaled_incidents(by_scaler=False, scale=5e4)["divergence"]
    assert "The optimizer used gradients that still had the loss scale, 50000 times those measured." in alert.message


def test_a_loss_scale_that_the_watch_does_not_have_is_no_clipping() -> None:
    alert = scaled_incidents(clip=None, given=False, rate=1e-9)["stalled"]
    assert alert.message.endswith(" The learning rate is 1e-9.")
    alert = scaled_incidents(clip=None, given=False, rate=1e-3, bad_batch=40)["spike"]
    assert alert.remedy == (
        "torch.nn.utils.clip_grad_norm_(model.parameters(), ...), with the usual norm of the gradient; a loss scale, "
        "if there is one, is no part of it."
    )


@pytest.mark.parametrize("given", [False, True])
def test_clipping_of_gradients_in_float16(given: bool) -> None:
    alert = scaled_incidents(clip=1e-6, unscales=True, given=given, half=True, scale=2.0**14)["stalled"]
    assert alert.message.endswith(" Clipping leaves 1e-6 of a gradient of norm 0.56 without the loss scale.")
    alert = scaled_incidents(clip=1.0, given=given, half=True, scale=2.0**14)["stalled"]
    assert alert.message.endswith(" Clipping leaves 6.1e-5 of a gradient of norm 0.96 without the loss scale.")


def test_an_intervention_that_enlarges_gradients_is_no_loss_scale() -> None:
    alert = scaled_incidents(clip=None, interventions=[Scale(200.0)])["divergence"]
    assert "The learning rate is too high for this model and loss (lr=0.05)." in alert.message
    alert = scaled_incidents(by_scaler=False, interventions=[Scale(200.0)])["divergence"]
    assert "The optimizer used gradients that still had the loss scale, 65536 times those measured." in alert.message


def test_bfloat16_swallows_small_steps() -> None:
    model = mlp().bfloat16()
    found = incidents_of(model, sgd(1e-5)(model))
    assert "half precision" in found["stalled"].message


def test_a_schedule_that_decays_with_every_batch() -> None:
    model = mlp()
    optimizer = adam()(model)
    found = incidents_of(model, optimizer, schedule=torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5), steps=90)
    assert "its schedule decays too fast" in found["stalled"].message


@pytest.mark.parametrize("make", [adam(5e-3, weight_decay=20), sgd(0.1, weight_decay=0.5)])
def test_weights_that_decay_away(make: Make) -> None:
    model = mlp()
    found = incidents_of(model, make(model))
    assert found["collapse"].severity is Severity.WARNING
    assert list(found) == ["collapse"]


def grouped(model: nn.Sequential, first: float) -> torch.optim.Optimizer:
    groups = [{"params": model[0].parameters(), "lr": first}, {"params": model[2:].parameters()}]
    return torch.optim.Adam(groups, lr=1e-2)


def test_a_group_whose_rate_is_zero() -> None:
    model = mlp()
    alert = incidents_of(model, grouped(model, 0.0))["frozen"]
    assert (alert.severity, alert.sites) == (Severity.WARNING, ("0",))


def test_a_layer_that_was_switched_off_by_mistake() -> None:
    model = mlp(depth=6)
    model[4].requires_grad_(False)
    alert = incidents_of(model, adam()(model), steps=40)["frozen"]
    assert (alert.severity, alert.sites) == (Severity.WARNING, ("4",))


def test_all_layers_that_were_switched_off_are_in_the_remedy() -> None:
    model = mlp(width=32, depth=6)
    for place in (4, 8):
        model[place].requires_grad_(False)
    alert = incidents_of(model, adam()(model), steps=40)["frozen"]
    assert alert.sites == ("4", "8")
    assert alert.remedy == "requires_grad_(True) for layers 4, 8."  # PEFT would match each name that ends in ".8"


@pytest.mark.parametrize(
    ("second", "peft"),
    [("middle", "; with PEFT, modules_to_save=['dense', 'score']"), ("block_dense", "")],
    ids=["names of their own", "a name that another ends in"],
)
def test_new_layers_are_all_named_to_peft(second: str, peft: str) -> None:
    """It takes each module whose name ends so."""
    sizes = {"first": (8, 64), second: (64, 64), "dense": (64, 64), "score": (64, 1)}
    model = nn.Sequential(OrderedDict((name, nn.Linear(*size)) for name, size in sizes.items()))
    for place in (2, 3):
        model[place].requires_grad_(False)
    alert = incidents_of(model, adam()(model), steps=40)["frozen"]
    assert alert.remedy == f"requires_grad_(True) for layers dense, score{peft}."


def test_what_is_frozen_beside_new_layers_is_in_the_remedy() -> None:
    torch.manual_seed(0)
    block = nn.Sequential(OrderedDict(up=nn.Linear(16, 64), norm=nn.LayerNorm(64), down=nn.Linear(64, 16)))
    model = nn.Sequential(nn.Linear(8, 200), nn.Linear(200, 16), block, nn.Linear(16, 1))
    block.requires_grad_(False)
    alert = incidents_of(model, adam()(model), steps=40)["frozen"]
    assert alert.sites == ("2.up", "2.down")
    named = "requires_grad_(True) for layers 2.up, 2.down"
    assert alert.remedy.startswith(f"{named} and for what else is frozen beside them")


# ---- healthy


def test_a_linear_regression_whose_solution_is_small() -> None:
    model = nn.Linear(8, 1)
    assert not incidents_of(model, sgd()(model), loss_of=lambda y, x: nn.functional.mse_loss(y, 0.1 * x))


def test_a_critic_whose_weights_are_clipped() -> None:
    """As in Arjovsky, Chintala, Bottou 2017: none is larger than 0.01 after a step."""
    model = nn.Sequential(nn.Linear(8, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))

    class Clipping:
        def step(self) -> None:
            for parameter in model.parameters():
                parameter.data.clamp_(-0.01, 0.01)

    optimizer = torch.optim.RMSprop(model.parameters(), 5e-5)
    assert not incidents_of(model, optimizer, schedule=Clipping(), loss_of=lambda y, x: (y * x).mean())


def test_the_loss_of_a_critic_that_falls_fast_is_bounded_by_its_adversary() -> None:
    """And by its weights, which are clipped: as in Arjovsky, Chintala, Bottou 2017, to 0.2."""
    generator = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    critic = nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(0.2))
    for _ in range(4):
        critic += nn.Sequential(nn.Linear(64, 64), nn.LeakyReLU(0.2))
    critic.append(nn.Linear(64, 1))
    one, other = (torch.optim.RMSprop(net.parameters(), 5e-4) for net in (critic, generator))
    fallen = []
    with Watch(nn.ModuleList([generator, critic]), rules=[Divergence()], sinks=(), budget=None) as watch:
        for step in range(60):
            angles, noise = torch.rand(128) * 2 * torch.pi, torch.randn(128, 4)
            real, optimizer = torch.stack([angles.cos(), angles.sin()], 1) * 2, other if step % 4 == 3 else one
            judged = critic(generator(noise)).mean()
            loss = -judged if optimizer is other else judged - critic(real).mean()
            nn.ModuleList([generator, critic]).zero_grad()
            loss.backward()
            watch.step(optimizer, loss=loss)
            optimizer.step()
            fallen.append(float(loss.detach()))
            for parameter in critic.parameters():
                parameter.data.clamp_(-0.2, 0.2)
    assert min(fallen) < 10 * min(fallen[:13])
    assert not watch.alerts


class Adapted(nn.Module):
    """A frozen linear layer with a low-rank adapter that starts at zero."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = (
            nn.Linear(base.in_features, 2, bias=False),
            nn.Linear(2, base.out_features, bias=False),
        )
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def low_rank() -> nn.Module:
    return nn.Sequential(*(Adapted(layer) if isinstance(layer, nn.Linear) else layer for layer in mlp(depth=4)))


def zero_head() -> nn.Module:
    model = mlp()
    nn.init.zeros_(model[-1].weight)
    return model


def tiny_before_norms() -> nn.Module:
    model = mlp(norm=True)
    with torch.no_grad():
        model[2].weight.mul_(1e-3)
    return model


def lr_lambda(rate: Callable[[int], float]) -> Callable[[Any], Any]:
    return lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, rate)


HEALTHY: dict[str, tuple[Callable[[], nn.Module], Make, dict[str, Any]]] = {
    "adam": (mlp, adam(), {}),
    "adapters from zero": (low_rank, adam(1e-2), {}),
    "head from zero": (zero_head, adam(), {}),
    "tiny weights before norms": (tiny_before_norms, adam(), {}),
    "tiny weights before norms, SGD": (tiny_before_norms, sgd(), {}),
    "summed": (mlp, adam(), {"loss_of": lambda x, y: nn.functional.mse_loss(x, y, reduction="sum")}),
    "tiny rate": (mlp, adam(1e-5), {}),
    "bfloat16": (lambda: mlp().bfloat16(), adam(1e-2), {}),
    "proper decay": (mlp, adam(1e-3, weight_decay=0.1), {}),
    "warm-up": (mlp, adam(), {"schedule": lr_lambda(lambda step: step / 60)}),
    "slow warm-up": (mlp, adam(), {"schedule": lr_lambda(lambda step: step / 1e5)}),
    "cosine": (mlp, adam(), {"schedule": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 60)}),
    "restarts": (mlp, adam(), {"schedule": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 20)}),
    "clipped": (mlp, sgd(), {"clip": 0.1}),
    "layer-wise rates": (
        mlp,
        lambda model: torch.optim.Adam(
            [{"params": layer.parameters(), "lr": 10.0 ** (i / 2 - 4)} for i, layer in enumerate(model)]  # type: ignore[arg-type]
        ),
        {},
    ),
}


@pytest.mark.parametrize("name", quick.cases(HEALTHY, ("adam", "bfloat16", "cosine", "clipped")))
def test_healthy_trainings_are_left_alone(name: str) -> None:
    make_model, make, options = HEALTHY[name]
    model = make_model()
    optimizer = make(model)
    if "schedule" in options:
        options = {**options, "schedule": options["schedule"](optimizer)}
    assert incidents_of(model, optimizer, steps=80, **options) == {}


def test_layers_that_have_thawed_in_turn() -> None:
    model = mlp()
    rates = [lambda step: float(step >= 25), lambda step: 1.0]
    optimizer = grouped(model, 1e-2)
    assert incidents_of(model, optimizer, schedule=torch.optim.lr_scheduler.LambdaLR(optimizer, rates), steps=100) == {}


def thawed_at(step: int, *, has_group: bool) -> Alert:
    """Of a first layer that is frozen until `step`, and in no optimizer then, or in a group whose rate is 0."""
    model = mlp()
    model[0].requires_grad_(False)
    groups = [{"params": model[2:].parameters()}]
    groups += [{"params": model[0].parameters(), "lr": 0.0}] * has_group
    optimizer = torch.optim.SGD(groups, lr=0.05)

    def loss(now: int) -> Tensor:
        model[0].requires_grad_(now >= step)
        return model(torch.randn(32, 8)).square().mean()

    watch = Watch(model, rules=(Frozen(),), sinks=(), budget=None)
    train(optimizer, loss, watch, steps=120)
    return watch.alerts[0]


def test_a_layer_that_is_thawed_and_does_not_train() -> None:
    alert = thawed_at(37, has_group=False)
    assert (alert.step, alert.sites) == (50, ("0",))
    assert alert.message.endswith(
        " unless something else changes them. requires_grad became True between steps 25 and 50."
    )
    alert = thawed_at(50, has_group=True)
    assert (alert.step, alert.sites) == (50, ("0",))
    assert alert.message.startswith("Layer 0 has not changed at all in 51 steps, in spite of a gradient")


def test_convergence_to_no_gradient_is_no_stall() -> None:
    model = nn.Sequential(nn.Linear(8, 1))
    inputs = torch.randn(8, 8)
    targets = inputs.sum(1, keepdim=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    watch = Watch(model, rules=(Stalled(), Divergence(), Frozen(), Collapse()), sinks=(), budget=None)
    train(optimizer, lambda step: nn.functional.mse_loss(model(inputs[:4]), targets[:4]), watch, steps=400)
    assert watch.history.series("loss")[-1] < 1e-9
    assert watch.alerts == ()


def test_weights_that_all_start_positive() -> None:
    """All outputs are about as large: a cross entropy is a small share of them."""
    torch.manual_seed(0)
    layers = [nn.Linear(8, 128), nn.Linear(128, 128), nn.Linear(128, 4)]
    for layer in layers:
        nn.init.uniform_(layer.weight)
    model = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])

    def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs, (targets[:, 0] > 0).long())

    found = incidents_of(model, torch.optim.Adam(model.parameters(), lr=1e-3), loss_of=loss_of, rules=[Exploding()])
    assert found["exploding"].remedy == "nn.init.kaiming_normal_ for the weights of layers 0, 2."


class Scaled(nn.Sequential):
    """Layers with weights `scale` times the usual; their outputs have the length 1 if they are `normalized`."""

    def __init__(self, scale: float, *, normalized: bool = False) -> None:
        super().__init__(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
        self.normalized = normalized
        for layer in list(self)[::2]:
            layer.weight.data.mul_(scale)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = super().forward(inputs)
        return nn.functional.normalize(outputs) if self.normalized else outputs


@pytest.mark.parametrize("loss_of", [nn.functional.mse_loss, nn.functional.l1_loss])
def test_a_shallow_net_whose_weights_start_too_large(loss_of: Callable[[Tensor, Tensor], Tensor]) -> None:
    def found(model: nn.Module) -> dict[str, Alert]:
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        return incidents_of(model, optimizer, loss_of=lambda x, y: loss_of(x, y.expand(-1, 4)), rules=[Exploding()])

    alert = found(Scaled(30.0))["exploding"]
    assert (alert.severity, alert.step, alert.noticed) == (Severity.WARNING, 0, 2)
    assert alert.layer in alert.sites == ("0", "2", "4")
    assert alert.message.startswith("The outputs of layer 4 have a root mean square of ")
    assert " times as large as is usual at the start of a training, and there is no norm." in alert.message
    assert alert.remedy == "nn.init.kaiming_normal_ for the weights of layers 0, 2, 4."
    assert not found(Scaled(3.0))
    assert not found(Scaled(30.0, normalized=True))


@pytest.mark.parametrize("part", ["weight", "bias"])
def test_a_head_that_starts_too_large_multiplies_nothing(part: str) -> None:
    torch.manual_seed(0)
    model = mlp(depth=5)
    model[-1].get_parameter(part).data.mul_(1e6)
    found = incidents_of(model, torch.optim.SGD(model.parameters(), lr=1e-18), rules=[Exploding()])
    assert not any("not large" in alert.message for alert in found.values())


def test_columns_of_large_numbers_beside_embeddings_are_no_factor() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"table": nn.Embedding(10, 8), "hidden": nn.Linear(10, 16), "head": nn.Linear(16, 1)})
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def loss_of(step: int) -> Tensor:
        kinds, columns = torch.randint(10, (32,)), torch.rand(32, 2) * 1e5
        hidden = model["hidden"](torch.cat([model["table"](kinds), columns], 1)).relu()
        return nn.functional.binary_cross_entropy_with_logits(model["head"](hidden)[:, 0], (kinds > 4).float())

    watch = Watch(model, rules=[Exploding()], sinks=(), budget=None)
    train(optimizer, loss_of, watch, steps=20)
    (alert,) = watch.alerts
    assert alert.message.endswith(
        " times: by other inputs that join there, as columns of large numbers, a sum over many, or a factor; and there "
        "is no norm."
    )
    assert (
        alert.remedy
        == "(x - mean) / std for what joins the embeddings before layer hidden; or a mean in place of a sum there."
    )


@pytest.mark.parametrize("mean", [False, True])
def test_sums_over_neighbours_make_outputs_too_large(mean: bool) -> None:
    """A graph convolution over 100 nodes, all of which are neighbours; a normalized adjacency matrix takes the mean."""
    torch.manual_seed(0)
    nodes, kinds = torch.randn(100, 8), torch.randint(4, (100,))
    adjacency = torch.ones(100, 100) / (100 if mean else 1)
    layers = nn.ModuleList([nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)])
    optimizer = torch.optim.Adam(layers.parameters(), lr=1e-2)

    def loss_of(step: int) -> Tensor:
        hidden = nodes
        for layer in layers:
            hidden = adjacency @ layer(hidden.relu() if layer is not layers[0] else hidden)
        return nn.functional.cross_entropy(hidden, kinds)

    watch = Watch(layers, rules=[Exploding()], sinks=(), budget=None)
    train(optimizer, loss_of, watch, steps=20)
    assert bool(watch.alerts) != mean
    for alert in watch.alerts:
        assert (alert.severity, alert.step, alert.noticed) == (Severity.WARNING, 0, 2)
        assert alert.layer in alert.sites == ("1", "2", "3")
        assert "although the weights are not large. Outputs grow most from layer " in alert.message
        assert alert.message.endswith("or a sum over many, such as all neighbours in a graph; and there is no norm.")
        assert alert.remedy == (
            "a mean in place of the sum, or an adjacency matrix that is normalized, before layers 1, 2, 3; or no "
            "factor, or nn.LayerNorm there."
        )
