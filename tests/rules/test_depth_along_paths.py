"""Depth rules along paths: towers, heads, skips and loops under real trainings, faulty ones beside healthy ones.

Trained under Lightning, where it is known which layers the loss uses directly.
"""

from collections import OrderedDict
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lightning as L
import quick
from gradwatch import GradWatch, Watch
from gradwatch.core.alert import Alert, Severity
from gradwatch.core.record import Layout
from gradwatch.rules import Dead, Exploding, Nonfinite, Vanishing
from gradwatch.rules.evidence.paths import NO_LAYER, paths
from gradwatch.sinks.memory import Memory
from synthetic_history import INF, NAN, judge_rows, layout, net, only, record, silent
from training import quiet_trainer, train

STEPS = 40


def mlp(*widths: int, act: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    pieces: list[nn.Module] = []
    for inside, outside in pairwise(widths):
        pieces += [nn.Linear(inside, outside), act()]
    return nn.Sequential(*pieces[:-1])


class Times(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * x


class Steps(torch.utils.data.Dataset[Any]):
    """Inputs [32, 16] and a smooth function of them [32, 1]."""

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, step: int) -> Any:
        x = torch.randn(32, 16, generator=torch.Generator().manual_seed(step))
        return x, torch.sin(x.sum(1, keepdim=True))


class Learner(L.LightningModule):
    """`objective(x, y)` is the loss."""

    def training_step(self, batch: Any, number: int) -> Any:
        return self.objective(*batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 1e-3)


def incidents_of(learner: L.LightningModule) -> dict[str, Alert]:
    """What all rules say of the training: rule -> its incident."""
    watch = GradWatch(sinks=[Memory()], budget=None)
    trainer = quiet_trainer(watch)
    trainer.fit(learner, torch.utils.data.DataLoader(Steps(), batch_size=None))
    assert watch.verdict.notes == ()
    assert watch.history.layout.edges is not None
    return {alert.rule: alert for alert in watch.alerts}


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


class Towers(Learner):
    """Half of the input through `a`, the other half through `b`, both into `head`."""

    def __init__(self, *, a: nn.Module | None = None, b: nn.Module | None = None, share: float = 1.0) -> None:
        super().__init__()
        self.a, self.b = a or mlp(8, 32, 32, 32, 16), b or mlp(8, 32, 32, 32, 16)
        self.head, self.share = mlp(32, 32, 1), share

    def objective(self, x: Tensor, y: Tensor) -> Tensor:
        both = torch.cat([self.a(x[:, :8]), self.share * self.b(x[:, 8:])], 1)
        return F.mse_loss(self.head(both), y)


class Normed(Learner):
    """A norm of the hidden units, whose outputs go into a last layer."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), norm, nn.ReLU(), nn.Linear(32, 1))

    def objective(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.model(x), y)


def test_a_norm_of_single_numbers_passes_nothing_on() -> None:
    incidents = incidents_of(Normed(nn.GroupNorm(32, 32)))
    assert list(incidents) == ["vanishing"]
    found = incidents["vanishing"]
    assert (found.layer, found.sites, found.step) == ("model.0", ("model.0",), 0)
    assert found.message.endswith(
        "Layer model.2 gives little but its bias: it normalises one number at a time, or numbers that hardly differ."
    )
    assert found.remedy == "a norm over several features in place of layer model.2, or none."
    assert incidents_of(Normed(nn.GroupNorm(4, 32))) == {}


def test_a_norm_of_two_numbers_passes_next_to_nothing_on() -> None:
    """As where a temporal fusion transformer weighs two variables."""
    pair = nn.Linear(32, 2)
    nn.init.constant_(pair.bias[0], 10.0)
    found = incidents_of(Normed(nn.Sequential(pair, nn.LayerNorm(2), nn.Linear(2, 32))))["vanishing"]
    assert (found.layer, found.sites) == ("model.2.0", ("model.0", "model.2.0"))
    assert found.message.endswith(
        "Layer model.2.1 normalises two numbers: it makes 1 and -1 of them, whatever they are."
    )
    assert found.remedy == "a norm over more features in place of layer model.2.1, or none."


class Bias(nn.Module):
    """A linear map whose bias is the layer's own, as in graph convolutions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lin = nn.Linear(width, width, bias=False)
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) + self.bias


class Biased(Learner):
    """`depth` such layers, whose outputs are multiplied by 0.3."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        layers = [Bias(16) for _ in range(depth)]
        for layer in layers:
            nn.init.kaiming_normal_(layer.lin.weight)
        self.model = nn.Sequential(*(nn.Sequential(layer, Times(0.3), nn.ReLU()) for layer in layers), nn.Linear(16, 1))

    def objective(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.model(x), y)


def test_biases_that_start_from_zero_excuse_nothing() -> None:
    incidents = incidents_of(Biased(8))
    assert list(incidents) == ["vanishing"]
    found = incidents["vanishing"]
    assert "model.0.0.lin" in found.sites
    assert found.message.endswith("though the weights are not small, and there is no norm.")


def test_weights_that_began_at_zero_are_named() -> None:
    learner = Normed(nn.Linear(32, 32))
    for layer in (learner.model[0], learner.model[2], learner.model[4]):
        nn.init.zeros_(layer.weight)
    found = incidents_of(learner)["vanishing"]
    assert found.message.endswith("The weights of layers model.2, model.4 began at 0, and pass on little.")
    assert found.remedy == "nn.init.kaiming_normal_ for the weights of layers model.2, model.4."


def test_a_norm_that_began_at_zero_gets_ones() -> None:
    learner = Normed(nn.Linear(32, 32))
    learner.model[2] = nn.LayerNorm(32)
    for layer in (learner.model[2], learner.model[4]):
        nn.init.zeros_(layer.weight)
    nn.init.ones_(learner.model[2].bias)
    found = incidents_of(learner)["vanishing"]
    assert found.message.endswith("The weights of layers model.2, model.4 began at 0, and pass on little.")
    assert found.remedy == (
        "nn.init.ones_ for the weights of layer model.2; nn.init.kaiming_normal_ for the weights of layer model.4."
    )


class Attention(Learner):
    """One attention over 16 places, with zeros for its inputs beside places, as the first of a DETR decoder."""

    def __init__(self, projection: Callable[[int, int], nn.Module] = nn.Linear, suffix: str = "proj") -> None:
        super().__init__()
        self.places, self.rest = nn.Linear(4, 16), mlp(16, 16, 1)
        self.projections = nn.ModuleDict({f"{word}_{suffix}": projection(16, 16) for word in ("q", "k", "v", "pos")})

    def objective(self, x: Tensor, y: Tensor) -> Tensor:
        places = self.places(torch.eye(4).repeat(4, 1))
        query, key, value, position = self.projections.values()
        scores = query(places) @ (key(places) + position(torch.eye(16))).T
        values = scores.softmax(1) @ value(torch.zeros(16, 16))
        return F.mse_loss(self.rest(x + values.mean(0)), y)


class Adapted(nn.Module):
    """A layer beside which a smaller one trains, as LoRA puts it in the place of a projection."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base_layer, self.lora = nn.Linear(inputs, outputs), mlp(inputs, 4, outputs)

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.base_layer(x) + self.lora(x)
        return added


@pytest.mark.parametrize(
    ("projection", "suffix"), [(nn.Linear, "proj"), (Adapted, "proj"), (nn.Linear, "content_proj")]
)
def test_attention_over_values_that_are_alike_does_not_vanish(projection: type[nn.Module], suffix: str) -> None:
    assert incidents_of(Attention(projection, suffix)) == {}


class Heads(Learner):
    """One trunk and two heads, whose losses have `weights`."""

    def __init__(self, *weights: float) -> None:
        super().__init__()
        self.weights = weights
        self.trunk, self.first, self.second = mlp(16, 32, 32), mlp(32, 32, 32, 1), mlp(32, 32, 32, 1)

    def objective(self, x: Tensor, y: Tensor) -> Tensor:
        z = torch.relu(self.trunk(x))
        return self.weights[0] * F.mse_loss(self.first(z), y) + self.weights[1] * F.mse_loss(self.second(z), y**2)


class Siamese(Learner):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = mlp(8, 32, 32, 16), mlp(16, 16, 1)

    def objective(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.head((self.encoder(x[:, :8]) - self.encoder(x[:, 8:])).abs()), y.abs())


class Variational(Learner):
    """The divergence is summed and the reconstruction averaged and small: the decoder gets far less than the code."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.mean, self.spread = mlp(16, 64, 64), nn.Linear(64, 8), nn.Linear(64, 8)
        self.decoder = mlp(8, 64, 64, 64, 16)

    def objective(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.encoder(x)
        mean, log_variance = self.mean(hidden), self.spread(hidden)
        code = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        divergence = (mean**2 + log_variance.exp() - log_variance - 1).sum()
        return 1e-4 * F.mse_loss(self.decoder(code), x) + divergence


class Supervised(Learner):
    """A head at every layer, the deeper the less its loss weighs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))
        self.heads = nn.ModuleList(nn.Linear(16, 1) for _ in range(6))

    def objective(self, x: Tensor, y: Tensor) -> Tensor:
        loss = torch.zeros(())
        for depth, (layer, head) in enumerate(zip(self.layers, self.heads, strict=True)):
            x = torch.relu(layer(x))
            loss = loss + 10.0**-depth * F.mse_loss(head(x), y)
        return loss


class Residual(Learner):
    """`blocks` of x -> skip x + gate f(norm(x)); `keep`: probability that a block runs."""

    def __init__(self, blocks: int = 8, *, skip: float = 1.0, keep: float = 1.0, gate: float = 1.0, norm: bool = True):
        super().__init__()
        self.skip, self.keep = skip, keep
        self.stem, self.head = nn.Linear(16, 32), nn.Linear(32, 1)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(32), *mlp(32, 32, 32)) for _ in range(blocks))
        self.norm = nn.LayerNorm(32) if norm else nn.Identity()
        self.gate = nn.Parameter(torch.full((blocks, 1), gate), requires_grad=gate != 1)

    def objective(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.stem(x)
        for block, gate in zip(self.blocks, self.gate, strict=True):
            x = self.skip * x
            if self.keep == 1 or torch.rand(()) < self.keep:
                x = x + gate * block(x)
        return F.mse_loss(self.head(self.norm(x)), y)


class Experts(Learner):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.gate, self.head = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(32, 1)
        self.experts = nn.ModuleList(mlp(32, 32, 32) for _ in range(16))

    def objective(self, x: Tensor, y: Tensor) -> Tensor:
        x = torch.relu(self.stem(x))
        weights, chosen = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            mine = (chosen == number).nonzero()[:, 0]
            if len(mine):
                out = out.index_add(0, mine, expert(x[mine]) * weights[mine][:, None])
        return F.mse_loss(self.head(x + out), y)


class UShaped(Learner):
    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.middle = (nn.Conv1d(i, 8, 3, padding=1) for i in (1, 8, 8))
        self.up2, self.up1, self.out = (nn.Conv1d(i, o, 3, padding=1) for i, o in ((16, 8), (16, 8), (8, 1)))

    def objective(self, x: Tensor, y: Tensor) -> Tensor:
        first = torch.relu(self.down1(x[:, None]))
        second = torch.relu(self.down2(F.max_pool1d(first, 2)))
        middle = torch.relu(self.middle(F.max_pool1d(second, 2)))
        second = torch.relu(self.up2(torch.cat([F.interpolate(middle, scale_factor=2), second], 1)))
        first = torch.relu(self.up1(torch.cat([F.interpolate(second, scale_factor=2), first], 1)))
        return F.mse_loss(self.out(first)[:, 0], x.sin())


class Translator(Learner):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 32), nn.Linear(32, 20)
        self.body = nn.Transformer(32, 4, 2, 2, 64, batch_first=True)

    def objective(self, x: Tensor, y: Tensor) -> Tensor:
        words = (x * 3).long().clamp(-9, 9) + 9
        mask = nn.Transformer.generate_square_subsequent_mask(15)
        hidden = self.body(self.embed(words), self.embed(words[:, :-1]), tgt_mask=mask)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), words[:, 1:].flatten())


class Recurrent(Learner):
    def __init__(self) -> None:
        super().__init__()
        self.read, self.cell, self.write = nn.Linear(1, 8), nn.GRUCell(8, 32), nn.Linear(32, 1)

    def objective(self, x: Tensor, y: Tensor) -> Tensor:
        hidden, loss = torch.zeros(len(x), 32), torch.zeros(())
        for step in range(16):
            hidden = self.cell(self.read(x[:, step : step + 1]), hidden)
            loss = loss + F.mse_loss(self.write(hidden), y)
        return loss


class Adversaries(L.LightningModule):
    """A generator and a discriminator in one module, each with its optimizer, or both with one."""

    def __init__(self, *, together: bool) -> None:
        super().__init__()
        self.together, self.automatic_optimization = together, False
        self.generator, self.discriminator = mlp(4, 32, 32, 16), mlp(16, 32, 32, 1)

    def configure_optimizers(self) -> Any:
        parts = [self] if self.together else [self.discriminator, self.generator]
        return [torch.optim.Adam(part.parameters(), 1e-3) for part in parts]

    def training_step(self, batch: Any, number: int) -> None:
        real, optimizers = batch[0], self.optimizers()
        critic, maker = (optimizers, optimizers) if self.together else optimizers
        fake = self.generator(real[:, :4])
        judged = F.softplus(-self.discriminator(real)) + F.softplus(self.discriminator(fake.detach()))
        critic.zero_grad()
        self.manual_backward(judged.mean())
        if not self.together:
            critic.step()
            maker.zero_grad()
        self.manual_backward(F.softplus(-self.discriminator(fake)).mean())
        maker.step()


def frozen_tower() -> Learner:
    return Towers(a=mlp(8, *[32] * 10, 16, act=nn.Sigmoid).requires_grad_(False))


HEALTHY: dict[str, Callable[[], L.LightningModule]] = {
    "two towers": Towers,
    "one branch a thousandth of the other": lambda: Towers(share=1e-3),
    "a frozen tower": frozen_tower,
    "the second head hardly counts": lambda: Heads(1.0, 1e-4),
    "the first head hardly counts": lambda: Heads(1e-5, 1.0),
    "Siamese": Siamese,
    "a variational autoencoder": Variational,
    "deep supervision": Supervised,
    "stochastic depth": lambda: Residual(keep=0.6),
    "nearly closed branches that open": lambda: Residual(gate=1e-6),
    "a deep pre-norm net": lambda: Residual(20),
    "a deep pre-norm net without a last norm": lambda: Residual(20, norm=False),
    "rare experts": Experts,
    "U-shaped": UShaped,
    "encoder and decoder": Translator,
    "a cell in a loop": Recurrent,
    "adversaries": lambda: Adversaries(together=False),
    "adversaries under one optimizer": lambda: Adversaries(together=True),
}


@pytest.mark.filterwarnings("ignore")  # Lightning's and torch's remarks on tiny trainings
@pytest.mark.parametrize("name", quick.cases(HEALTHY, ("two towers", "U-shaped", "stochastic depth")))
def test_healthy_trainings_are_left_alone(name: str) -> None:
    assert incidents_of(HEALTHY[name]()) == {}


def fading() -> nn.Module:
    return mlp(8, *[32] * 8, 16, act=nn.Sigmoid)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tower", ["a", "b"])
def test_vanishing_in_one_tower(tower: str) -> None:
    alert = incidents_of(Towers(**{tower: fading()}))["vanishing"]
    assert alert.layer == f"{tower}.0"
    assert {site.partition(".")[0] for site in alert.sites} == {tower}
    assert f"The backward signal of layer {tower}.0 is " in alert.message
    assert "nn.Sigmoid passes on a quarter" in alert.message


@pytest.mark.filterwarnings("ignore")
def test_an_abrupt_edge_in_a_branch() -> None:
    branch = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), Times(1e-6), nn.Linear(32, 16))
    alert = incidents_of(Towers(b=branch))["vanishing"]
    assert (alert.layer, alert.sites) == ("b.2", ("b.0", "b.2"))
    assert "Most is lost between layers b.4 and b.2" in alert.message


@pytest.mark.filterwarnings("ignore")
def test_an_explosion_in_one_branch() -> None:
    branch = mlp(8, *[32] * 8, 16)
    for layer in branch:
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight)
    alert = incidents_of(Towers(b=branch, share=1e-6))["exploding"]
    assert alert.layer == "b.0"
    assert {site.partition(".")[0] for site in alert.sites} == {"b"}


@pytest.mark.filterwarnings("ignore")
def test_skips_that_multiply_around_the_norms() -> None:
    alert = incidents_of(Residual(20, skip=3.0, norm=False))["exploding"]
    assert alert.layer == "stem"
    assert "The outputs grow as much up to layer head: skip connections multiply, around the norms." in alert.message
    assert alert.remedy == "x + layer(x) with a factor of 1 for x, and a norm before the last layer."


# ---- made up


def shape(names: str, *edges: str) -> Layout:
    """Layers of one letter; edges are pairs of letters, the second a "!" for the loss."""
    plain = layout(list(names))
    pairs = tuple((plain.find(a), 0 if b == "!" else plain.find(b)) for a, b in edges)
    return Layout(plain.sites, plain.order, plain.modules, pairs)


def history(made: Layout) -> Any:
    from gradwatch.core.history import History

    return History(made)


def test_a_head_that_hardly_counts_is_no_explosion() -> None:
    signals = {"signals": [1, 1, 1, 1, 1e-5, 1e-5, 1e-5]}
    apart = shape("abcdxyz", "ab", "bc", "cd", "bx", "xy", "yz")
    assert silent(judge_rows(Exploding(), history(apart), [signals] * 4))
    assert not silent(judge_rows(Exploding(), net(7), [signals] * 4))


BESIDE = shape("abcd", "ab", "bc", "ac", "cd", "d!")
"""Layer b lies beside a skip connection."""


def ended(*, before: int = 40, after: int = 40, rests: int = 0, then: float = 1.0, made: Layout = BESIDE) -> Any:
    """What is found of layer b, whose gradient is 0 in the last rows, and in every `rests`-th before; that of layer c
    is `then` there.
    """
    had = [{"gradients": [1, 0 if rests and step % rests == 0 else 1, 1, 1]} for step in range(before)]
    return judge_rows(Dead(), history(made), [*had, *[{"gradients": [1, 0, then, 1]}] * after])


def test_a_layer_beside_a_skip_connection_that_gets_no_gradient_any_more() -> None:
    outcome = ended()
    found = only(outcome[-1])
    assert (found.layer, found.sites, found.severity, found.onset) == ("b", ("b",), Severity.WARNING, 40)
    assert "has been exactly 0 for 20 steps or more, while layer c after it gets one" in found.message
    assert silent(outcome[:59])
    assert outcome[59]


@pytest.mark.parametrize(
    "rows",
    [{"rests": 7}, {"before": 15}, {"made": shape("abcd", "ab", "ac", "cd", "d!", "b!")}],
    ids=["an expert that rests at times", "not seen long enough", "a head of its own"],
)
def test_other_layers_with_a_gradient_of_zero(rows: dict[str, Any]) -> None:
    assert silent(ended(**rows))
    assert not silent(ended())


def test_layers_before_it_are_what_it_does() -> None:
    found = only(ended(then=0.0)[-1])
    assert (found.layer, found.sites) == ("c", ("c",))
    assert [(effect.rule, effect.sites) for effect in found.effects] == [("starved", ("b",))]
    assert "layer c, and of layer b before it, has been exactly 0" in found.message


class Block(nn.Module):
    """x + relu(mlp(x)), without a module to ask which units fire."""

    def __init__(self, width: int, scale: float) -> None:
        super().__init__()
        self.mlp, self.scale = nn.Linear(width, width), scale

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * nn.functional.relu(self.mlp(x))


@pytest.mark.parametrize("depth", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_a_block_of_a_deep_stack_that_gets_no_gradient_any_more(depth: int) -> None:
    torch.manual_seed(0)
    blocks = {f"blocks_{i}": Block(16, depth**-0.5) for i in range(depth)}
    model = nn.Sequential(OrderedDict(stem=nn.Linear(4, 16), **blocks, head=nn.Linear(16, 1)))
    optimizer, watch = torch.optim.AdamW(model.parameters(), lr=1e-3), Watch(model, sinks=())

    def kill(step: int) -> None:
        if step == 60:
            blocks["blocks_6"].mlp.bias.data.fill_(-1e4)

    x = torch.randn(32, 4)
    train(optimizer, lambda _: nn.functional.mse_loss(model(x), x[:, :1].sin()), watch, steps=130, before=kill)
    alert = only(watch.alerts)
    assert (alert.rule, alert.layer, alert.sites, alert.step) == ("dead", "blocks_6.mlp", ("blocks_6.mlp",), 60)
    assert alert.noticed < 60 + 60  # 20 records; of many layers not every step is measured


def test_what_the_loss_hears_of_directly_is_its_side() -> None:
    signals = {"signals": [1e5, 1e5, 1e5, 1e5, 1, 1, 1]}
    chain = ("ab", "bc", "cd", "de", "ef", "fg")
    assert silent(judge_rows(Exploding(), history(shape("abcdefg", *chain, "d!", "g!")), [signals] * 4))
    assert not silent(judge_rows(Exploding(), history(shape("abcdefg", *chain, "g!")), [signals] * 4))


def test_a_branch_is_not_judged_by_the_queries_at_its_end() -> None:
    """As in the decoder of mBART at its start: the scores of an attention over values that are alike hardly matter."""
    signals = {"signals": [1e5, 1e5, 1e5, 1, 1, 1e5, 1, 1e5]}

    def judged(end: str) -> Any:
        edges = ("ab", "bc", "cd", f"d{end}", f"{end}o", "xk", "ko", "o!")
        return judge_rows(Exploding(), history(shape(f"abcd{end}xko", *edges)), [signals] * 4)

    assert silent(judged("q"))
    assert not silent(judged("p"))


def test_a_layer_between_input_and_loss_is_no_explosion() -> None:
    """Nothing lies behind it that it could be stronger than."""
    made = history(shape("abcdx", "ab", "bc", "cd", "d!", "x!"))
    assert silent(judge_rows(Exploding(), made, [{"signals": [1, 1, 1, 1, 1e4]}] * 4))


def test_skips_that_multiply_in_one_of_two_towers() -> None:
    plain = shape("abcdwxyz", "ab", "bc", "cd", "d!", "wx", "xy", "yz", "z!")
    made = history(Layout(plain.sites, plain.order, frozenset({"LayerNorm"}), plain.edges))
    outputs = np.full(len(made.layout), NAN)
    outputs[:9] = [1e4, 1, 1, 1e4, 1e4, *[1e3] * 4]
    for _ in range(3):
        record(made, signals=[1e5, 1e4, 10, 1, 1, 1, 1, 1], weights=1.0)
        made.amend({"output_rms": outputs}, {})
    assert "around the norms" in only(Exploding()(made)).message


def test_a_model_of_which_queries_and_keys_alone_train() -> None:
    """As with LoRA."""
    made = history(layout(["a.q", "a.k", "b.q", "b.k"]))
    assert silent(judge_rows(Exploding(), made, [{"signals": [1, 1e4, 1, 1]}] * 4))


def test_branches_may_differ_in_scale() -> None:
    edges = ("ab", "bc", "cd", "xy", "yz", "zd")
    for factor, faulty in ((1e-5, False), (1e-6, True)):
        rows = [{"signals": [1, 1, 1, 1, factor, factor, factor]}] * 3
        made = shape("abcdxyz", *edges)
        found = judge_rows(
            Vanishing(), history(Layout(made.sites, (1, 2, 3, 5, 6, 7, 4), made.modules, made.edges)), rows
        )
        assert bool(found[-1]) is faulty
        if found[-1]:
            assert (only(found[-1]).layer, only(found[-1]).sites) == ("z", ("x", "y", "z"))
            assert "Most is lost between layers d and z" in only(found[-1]).message


def test_a_layer_that_starts_from_zero_excuses_its_own_path_only() -> None:
    made = shape("abcxyzh", "ab", "bc", "ch", "xy", "yz", "zh")
    rows = []
    for step in range(12):
        growing = 1e-6 * 2.0**step
        rows.append({"signals": [1e-7, 1e-7, 1, 1e-7, 1e-7, 1, 1], "weights": [1, 1, growing, 1, 1, 1, 1]})
    assert only(judge_rows(Vanishing(), history(made), rows)[-1]).sites == ("x", "y")
    rows = [{**row, "weights": [*row["weights"][:2], row["weights"][2], 1, 1, row["weights"][2], 1]} for row in rows]
    assert silent(judge_rows(Vanishing(), history(made), rows))


@pytest.mark.parametrize(("small", "faulty"), [("b", False), ("abc", True)], ids=["scales", "a small start"])
def test_a_layer_that_starts_from_zero_waits_as_its_neighbours_do(small: str, faulty: bool) -> None:
    made, rows = shape("abcdh", "ab", "bc", "cd", "dh"), []
    for step in range(12):
        growing = 1e-6 * 2.0**step
        weights = [growing if name in small + "d" else 1 for name in "abcdh"]
        rows.append({"signals": [1e-7, 1e-7, 1e-7, 1, 1], "weights": weights})
    assert bool(judge_rows(Vanishing(), history(made), rows)[-1]) is faulty


@pytest.mark.parametrize(("samples", "faulty"), [(9, False), (10, True)])
def test_whether_weights_of_nearly_zero_grow_takes_some_samples_to_tell(samples: int, faulty: bool) -> None:
    """The learning rate may begin at 0."""
    rows = [{"signals": [1e-7, 1e-7, 1, 1], "weights": [1, 1, 1e-6, 1]}] * samples
    assert bool(judge_rows(Vanishing(), history(shape("abch", "ab", "bc", "ch")), rows)[-1]) is faulty


def test_weights_that_start_from_zero_somewhere_else_excuse_all() -> None:
    made = layout(list("abcdg"), order=list("abcd"))
    rows = [{"signals": [1e-6, 1e-6, 1e-6, 1, 0], "weights": [1, 1, 1, 1, 1e-6 * 2.0**step]} for step in range(12)]
    assert silent(judge_rows(Vanishing(), history(made), rows))
    steady = [{**row, "weights": 1.0} for row in rows]
    assert not silent(judge_rows(Vanishing(), history(made), steady))


def test_the_healthy_neighbour_of_a_non_finite_layer_is_on_its_path() -> None:
    made = history(shape("abxyh", "ab", "bh", "xy", "yh"))
    record(made, [INF, INF, 1, 1, 1], loss=1.0)
    found = only(Nonfinite()(made))
    assert found.layer == "b"
    assert "layer h" in found.message


@pytest.mark.parametrize("seed", range(10))
def test_up_and_down_stream_against_a_slow_reference(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = 10
    names = "abcdefghij"
    pairs = [(i, j) for j in range(n) for i in range(j) if rng.random() < 0.25]
    made = shape(names, *(names[i] + names[j] for i, j in pairs))
    kept = np.flatnonzero(rng.random(n) < 0.8)
    reach = np.eye(n, dtype=bool)
    for j in range(n):
        for i in [i for i, k in pairs if k == j]:
            reach[:, j] |= reach[:, i]
    reach = reach[np.ix_(kept, kept)]
    flow, values = paths(made, kept + 1), rng.random(len(kept))
    most, place = flow.downstream(values)
    for i in range(len(kept)):
        assert flow.upstream(values)[i] == values[reach[:, i]].max()
        behind = reach[i] & (np.arange(len(kept)) != i)
        assert most[i] == values[behind].max(initial=NO_LAYER)
        assert not behind.any() or values[place[i]] == most[i]
        chosen = np.arange(len(kept)) == i
        assert flow.below(chosen).tolist() == behind.tolist()
        assert flow.above(chosen).tolist() == (reach[:, i] & ~chosen).tolist()
        if behind.any():
            way = flow.way(i, int(place[i]), values)
            assert all(b in flow.after[a] for a, b in pairwise(way))
            assert way[-1] == place[i]
    assert flow.ends.tolist() == [not after for after in flow.after]
    assert flow.starts.tolist() == (reach.sum(axis=0) == 1).tolist()
    starts = np.flatnonzero(flow.starts)
    alone = [np.flatnonzero(reach[start] & (reach[starts].sum(axis=0) == 1)).tolist() for start in starts]
    expected = [branch for branch in alone if len(branch) >= 2] if len(starts) > 1 else []
    assert [branch.tolist() for branch in flow.branches(2)] == expected


def test_an_unknown_flow_is_a_chain() -> None:
    made = net(5, order=["fc1", "fc0", "fc2", "fc4"]).layout
    flow = paths(made, np.array([2, 1, 5]))
    assert flow.before == ((), (0,), (1,))
    assert (flow.depth, flow.near_loss(2).tolist()) == (3, [False, True, True])
