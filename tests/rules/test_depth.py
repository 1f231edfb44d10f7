"""Vanishing and exploding: a faulty run raises the right alert, a healthy one none."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gradwatch.core.alert import Finding, Severity
from gradwatch.core.history import History
from gradwatch.core.record import Missing
from gradwatch.rules import Exploding, Vanishing
from synthetic_history import INF, NAN, judge_rows, judge_steps, layout, net, noise, only, record, silent

FADING = 10.0 ** -np.arange(5.0, -1, -1)


def test_vanishing_gradual() -> None:
    history = net(modules=("Linear", "Sigmoid"))
    outcome = judge_rows(Vanishing(), history, [{"signals": FADING, "weights": 1.0}] * 3)
    assert outcome[:2] == [None, None]
    found = only(outcome[2])
    assert (found.severity, found.layer, found.sites) == (Severity.WARNING, "fc0", ("fc0", "fc1"))
    assert (found.value, found.threshold) == (pytest.approx(5.0), 3.5)
    assert found.message == (
        "The backward signal of layer fc0 is 1e5 times weaker than that of layer fc5, for 3 samples; up to 3162 "
        "is normal. It fades gradually, by 10 times a layer: nn.Sigmoid passes on a quarter of a signal at most."
    )
    assert found.remedy == "nn.ReLU instead of nn.Sigmoid, with nn.init.kaiming_normal_ weights."


@pytest.mark.parametrize(
    ("rule", "signals", "clause"),
    [
        (Vanishing(), FADING, "1e5 times weaker than layer 5"),
        (Exploding(), FADING[::-1], "1000 times stronger than layer 5"),
    ],
)
def test_the_headline_calls_a_layer_one_whose_name_is_a_number(rule: Any, signals: Any, clause: str) -> None:
    history = History(layout([str(place) for place in range(6)], modules=("Linear", "Sigmoid")))
    assert only(judge_rows(rule, history, [{"signals": signals, "weights": 1.0}] * 3)[-1]).headline == clause


def test_a_smaller_fall_counts_where_the_loss_has_not_moved() -> None:
    rows = [{"signals": 10.0 ** -np.arange(2.5, -0.1, -0.5), "loss": 1.0}] * 160
    outcome = judge_rows(Vanishing(), net(modules=("Sigmoid",)), rows)
    assert silent(outcome[:149])
    assert "for 3 samples; up to 100 is normal where the loss has not moved. It fades" in only(outcome[-1]).message
    assert silent(judge_rows(Vanishing(), net(), [{**row, "loss": 0.99**step} for step, row in enumerate(rows)]))
    forgetful = net()
    forgetful.capacity = 156
    learnt = [{**row, "loss": 2.0 - step / 160} for step, row in enumerate(rows)]
    assert silent(judge_rows(Vanishing(), forgetful, learnt + rows))
    assert Vanishing()(forgetful) is None


@pytest.mark.parametrize(
    ("modules", "words", "remedy"),
    [
        (("Tanh",), "nn.Tanh with weights too small, and no norm.", "nn.init.xavier_normal_("),
        (("ReLU", "Softmax"), "nn.Softmax divides what it passes on", "nn.ReLU instead of nn.Softmax between"),
        (
            ("ReLU", "LayerNorm"),
            "in spite of the norms.",
            "residual connections around the layers: x + layer(x); where there are some, with the norm inside: "
            "x + layer(norm(x)).",
        ),
        (("ReLU",), "the initial weights are too small, and there is no norm.", "nn.init.kaiming_normal_ for"),
    ],
)
def test_vanishing_names_the_likely_cause(modules: tuple[str, ...], words: str, remedy: str) -> None:
    rows = [{"signals": FADING, "gradients": FADING, "weights": 1.0}] * 3
    found = only(judge_rows(Vanishing(), net(modules=modules), rows)[-1])
    assert words in found.message
    assert found.remedy.startswith(remedy)


@pytest.mark.parametrize(
    ("module", "depth", "proposed"), [("Sigmoid", 13, 1), ("Sigmoid", 12, 0), ("LayerNorm", 13, 1)]
)
def test_residual_connections_are_proposed_once_in_deep_models(module: str, depth: int, proposed: int) -> None:
    rows = [dict.fromkeys(("signals", "gradients"), np.geomspace(1e-5, 1, depth)) | {"weights": 1.0}] * 3
    found = only(judge_rows(Vanishing(), net(depth, modules=(module,)), rows)[-1])
    assert found.remedy.count("residual connections around the layers: x + layer(x)") == proposed


@pytest.mark.parametrize(
    ("modules", "words"),
    [
        (("Tanh",), "nn.Tanh with weights too large, and no norm."),
        (("ReLU",), "though the weights are not small, and there is no norm."),
    ],
)
def test_weights_of_the_usual_size_are_not_called_small(modules: tuple[str, ...], words: str) -> None:
    rows = [{"signals": FADING, "gradients": FADING, "weights": 1000**0.25}] * 3
    found = only(judge_rows(Vanishing(), net(modules=modules), rows)[-1])
    assert words in found.message
    assert "too small" not in found.message


def test_gates_that_biases_close_are_named() -> None:
    def said(bias: float) -> Finding:
        rows: list[dict[str, Any]] = [{"signals": FADING, "gradients": FADING}] * 3
        history = net()
        layout, norms = history.layout, np.full(len(history.layout), np.nan)
        outputs = norms.copy()
        for site, owner in zip(layout.parameters, layout.owners, strict=True):
            closed = layout.sites[site].name == "fc2.bias"
            norms[site] = (bias if closed else 1e-3) * 500**0.5
            outputs[owner] = 4.0
        for row in rows:
            record(history, **row)
            history.amend({"weight_norm": norms, "output_rms": outputs}, {})
        return only(Vanishing()(history))

    closed = said(4.0)
    assert "The biases of layer fc2 make most of their outputs: a gate that they close" in closed.message
    assert closed.remedy == "nn.init.ones_ for the bias of layer fc2: a gate starts open then."
    assert "biases" not in said(0.5).message
    assert "biases" not in said(1.5).message, "they do not make most of the outputs"


@pytest.mark.parametrize(("outputs", "factor"), [(1e-4, "10000"), (1e4, "0.0001"), (0.1, "")])
def test_a_factor_between_two_layers_is_told_by_their_outputs(outputs: float, factor: str) -> None:
    history = net()
    for _ in range(3):
        record(history, signals=[2e-6, 1e-6, 3e-6, 0.5, 1.0, 0.8])
        levels = np.full(len(history.layout), np.nan)
        levels[history.layout.layers] = [1, 1, 1, outputs, outputs, outputs]
        weights = np.full(len(history.layout), np.nan)
        weights[history.layout.parameters] = 500**0.25
        history.amend({"output_rms": levels, "weight_norm": weights}, {})
    found = only(Vanishing()(history))
    remedy = found.remedy
    assert ("a factor makes what passes small" in found.message) == bool(factor)
    assert remedy.startswith(f"x * {factor} before layer fc3: its outputs are 10000 times as " if factor else "a norm")
    record(history, signals=[2e6, 1e6, 3e6, 0.5, 1.0, 0.8])
    found = only(Exploding()(history))
    assert found.message.endswith(f"between layers fc3 and fc2: a factor{', or large weights' * (not factor)}.")
    assert found.remedy.startswith(f"x * {factor} before layer fc3: " if factor else "nn.init.kaiming_normal_ for the")


def test_vanishing_abrupt_names_the_edge() -> None:
    found = only(judge_rows(Vanishing(), net(), [{"signals": [2e-6, 1e-6, 3e-6, 0.5, 1.0, 0.8]}] * 3)[-1])
    assert (found.layer, found.sites) == ("fc2", ("fc0", "fc1", "fc2"))
    assert "Most is lost between layers fc3 and fc2: saturation, a factor or a bottleneck." in found.message
    assert found.remedy == "a normalisation layer between fc2 and fc3, and no constant factor there."


def test_a_signal_that_fades_abruptly_later_is_most_often_of_large_steps() -> None:
    def remedy(module: str) -> str:
        linear = layout([f"fc{i}" for i in range(6)])
        sites = [site._replace(module=module) if site.name == "fc3" else site for site in linear.sites]
        rows = [{"signals": 1.0}] * 5 + [{"signals": [2e-6, 1e-6, 3e-6, 0.5, 1.0, 0.8]}] * 3
        return only(judge_rows(Vanishing(), History(replace(linear, sites=tuple(sites))), rows)[-1]).remedy

    smaller = "a smaller lr in configure_optimizers; or "
    assert remedy("Linear") == f"{smaller}a normalisation layer between fc2 and fc3, and no constant factor there."
    # a norm before a norm helps nothing
    assert remedy("LayerNorm") == f"{smaller}no constant factor and no saturated activation between fc2 and fc3."


def test_a_signal_of_exactly_zero_needs_longer() -> None:
    outcome = judge_rows(Vanishing(), net(), [{"signals": [0, 0, 0, 1, 1, 1], "weights": 1.0}] * 10)
    assert silent(outcome[:9])
    found = only(outcome[9])
    assert found.message == (
        "No backward signal at all reaches layer fc0, while layer fc5 gets one. "
        "It ends between layers fc3 and fc2: dead or saturated units, or a factor of 0."
    ).replace("fc5", "fc3")


def test_a_signal_that_fades_to_zero_is_found_at_once() -> None:
    """Where float32 holds no smaller number it is 0: that is no batch's chance."""
    signals = [0.0, 0.0, 1e-44, 1e-29, 1e-14, 1.0]
    outcome = judge_rows(Vanishing(), net(), [{"signals": signals}] * 3)
    assert silent(outcome[:2])
    found = only(outcome[2])
    assert (found.layer, found.sites) == ("fc0", ("fc0", "fc1", "fc2", "fc3", "fc4"))
    assert found.message == (
        "No backward signal at all reaches layer fc0, while layer fc5 gets one. It fades gradually, by 4.6e14 times a "
        "layer: most often the initial weights are too small, and there is no norm."
    )


def test_vanishing_without_signals_goes_by_the_gradients_with_more_room() -> None:
    assert silent(judge_rows(Vanishing(), net(order=()), [{"gradients": FADING**0.99 * 3}] * 5))
    found = only(judge_rows(Vanishing(), net(order=()), [{"gradients": FADING**1.5}] * 3)[-1])
    assert found.message.startswith("The gradient of layer fc0 is 3.2e7 times weaker than that of layer fc5")


def test_between_samples_it_cannot_tell() -> None:
    history = net()
    judge_rows(Vanishing(), history, [{"signals": FADING, "weights": 1.0}] * 5)
    assert judge_rows(Vanishing(), history, noise(100)) == [None] * 100
    assert judge_rows(Vanishing(), history, [{"signals": FADING, "weights": 1.0}])[0]


def test_when_signals_stop_coming_the_gradients_are_judged() -> None:
    history, rule = net(), Vanishing(stale_records=100)
    outcome = judge_rows(rule, history, [{"signals": 1.0}, *([{"gradients": FADING**1.5}] * 110)])
    assert outcome[1:100] == [None] * 99
    assert all(outcome[100:])


def test_vanishing_is_judged_per_optimizer() -> None:
    ours = {"signals": FADING, "optimizer": 0}
    theirs = {"signals": 1.0, "optimizer": 1}
    outcome = judge_rows(Vanishing(), net(), [ours, theirs] * 3)
    assert [bool(found) for found in outcome] == [False] * 4 + [True, False]


@pytest.mark.parametrize(
    "signals",
    [
        10 ** np.linspace(-2, 0, 6),
        [1.0, 1e-9, 1.0, 1e-7, 0.0, 1.0],
        [1e-2, 1, 1, 1, 1, 1e-12],
        [NAN, NAN, 1.0, 1.0, 1.0, 1.0],
        0.0,
    ],
    ids=["a wide spread", "weak layers inside", "a weak head", "not executed", "nothing but zeros"],
)
def test_vanishing_stays_silent(signals: Any) -> None:
    assert silent(judge_rows(Vanishing(), net(), [{"signals": signals, "weights": 1.0}] * 15))


def test_frozen_layers_do_not_vanish() -> None:
    codes = {"fc0": Missing.FROZEN, "fc1": Missing.NO_GRADIENT}
    assert silent(judge_rows(Vanishing(), net(), [{"signals": [0, 0, 1, 1, 1, 1], "codes": codes}] * 15))


@pytest.mark.parametrize("signs", [True, False], ids=["steady", "a random walk"])
def test_before_a_layer_that_starts_from_zero_the_signal_comes_with_its_weights(signs: bool) -> None:
    rng, head, rows = np.random.default_rng(0), 0.0, []
    for _ in range(40):
        rows.append({"signals": [head * 0.1] * 5 + [1.0], "weights": [1, 1, 1, 1, 1, abs(head)]})
        head += 1e-6 if signs else abs(rng.normal(0, 1e-6))
    assert silent(judge_rows(Vanishing(), net(), rows))


def test_weights_that_stay_at_zero_excuse_nothing_for_long() -> None:
    rows = [{"signals": [1e-9] * 5 + [1.0], "weights": [1, 1, 1, 1, 1, 1e-7]}] * 30
    assert judge_rows(Vanishing(), net(), rows)[-1]


@pytest.mark.parametrize(("rule", "scale"), [(Vanishing(), 1e-5), (Exploding(), 1e5)])
def test_a_norm_may_absorb_the_scale_of_the_weights(rule: Any, scale: float) -> None:
    signals, weights = [scale, scale, scale, 1, 1, 1], [1 / scale, 1 / scale, 1 / scale, 1, 1, 1]
    rows = [{"signals": signals, "gradients": signals, "weights": weights}] * 5
    assert silent(judge_rows(rule, net(modules=("BatchNorm1d",)), rows))
    assert not silent(judge_rows(rule, net(modules=("ReLU",)), rows))


def test_a_signal_that_grows_and_comes_to_no_gradient() -> None:
    """A norm multiplies by 1,000 what flows back to inputs of 0, as to the embedding of padding: they make no gradient.
    Weights of a norm may start at 0, to which it adds 1.
    """
    row = {"signals": [1e10, 1e8, 1e5, 1e3, 1, 1], "weights": [1.0, 1.0, 1.0, 1.0, 0.0, 0.0]}
    embedded = {**row, "gradients": [3.0, 2.0, 1.0, 1.0, 0.1, 0.1]}
    assert silent(judge_rows(Exploding(), net(modules=("RMSNorm",)), [embedded] * 3))
    grown = {**row, "gradients": [1e10, 1e8, 1e5, 1e3, 1, 1]}
    assert not silent(judge_rows(Exploding(), net(modules=("RMSNorm",)), [grown] * 3))


def dying(losses: Sequence[float], levels: Sequence[float]) -> list[dict[str, Any]]:
    return [{"gradients": level, "loss": loss} for loss, level in zip(losses, levels, strict=True)]


def test_a_gradient_that_died_with_nothing_learnt() -> None:
    found = only(judge_rows(Vanishing(), net(), dying([0.69] * 40, [1.0] * 20 + [1e-6] * 20))[-1])
    assert (found.layer, found.sites, found.value) == ("total", (), pytest.approx(6.0))
    assert found.message.startswith(
        "The total gradient norm fell from 2.4 to 2.4e-6 while the loss did not improve (0.69 at first, now 0.69): "
        "the model stopped learning. Most often its units"
    )
    assert (found.onset, found.headline) == (20, "the gradient norm fell from 2.4 to 2.4e-6, the loss did not")


def test_the_loss_before_the_history_is_not_spoken_of() -> None:
    history = net()
    history.capacity = 40
    found = only(judge_rows(Vanishing(), history, dying([9.0] * 20 + [0.69] * 60, [1.0] * 60 + [1e-6] * 20))[-1])
    assert "did not improve (0.69 from step 40 on, now 0.69)" in found.message
    history = net()
    history.capacity = 40
    found = only(judge_rows(Vanishing(), history, dying([99.0] * 20 + [12.8] * 40, [1.0] * 40 + [0.0] * 20))[-1])
    assert "the loss is 12.8 (12.8 from step 20 on)" in found.message


def test_a_gradient_of_one_of_several_optimizers_that_died() -> None:
    ours = {"codes": dict.fromkeys(["fc0", "fc1"], Missing.OTHER_OPTIMIZER), "optimizer": 0}
    theirs = {"codes": {"fc2": Missing.OTHER_OPTIMIZER}, "gradients": 1.0, "loss": 1.0, "optimizer": 1}
    rows = [
        row for own in dying([-0.7] * 20 + [0.0] * 20, [1.0] * 20 + [1e-6] * 20) for row in ({**own, **ours}, theirs)
    ]
    found = only(judge_rows(Vanishing(), net(3), rows)[-2])
    assert (found.layer, found.sites, found.onset) == ("fc2", ("fc2",), 39)
    assert found.message == (
        "The gradient of layer fc2, all that this optimizer holds, fell from a norm of 1 to 1e-6 while its loss did "
        "not improve (-0.7 at first, now 0): it learns nothing more. Most often its units are saturated or dead, after "
        "too large a step, or its loss is flat where another model is sure, as log(1 - D(G(z))) is."
    )
    assert found.remedy == (
        "a smaller lr for this optimizer; or a loss with a slope there, such as F.softplus(-logits), or fewer and "
        "smaller steps of the others."
    )


def test_no_gradient_at_all_since_the_first_steps() -> None:
    found = only(judge_rows(Vanishing(), net(), dying([13.4] + [12.8] * 20, [1.0] + [0.0] * 20))[-1])
    assert found.message == (
        "The gradient of every layer has been exactly 0 for 20 steps, and the loss is 12.8 (12.8 at first): the model "
        "stopped learning. Most often a ReLU or clamp of its outputs gives one number only, or its units are saturated "
        "or dead, after too large a step."
    )
    assert found.remedy.startswith("no ReLU or clamp after the last layer; or a smaller lr")
    assert (found.onset, found.headline) == (20, "every gradient has been exactly 0 for 20 steps")


@pytest.mark.parametrize(
    ("losses", "levels"),
    [
        ([12.8] * 21, [0.0] * 21),
        ([1.0] + [0.9] * 19, [1.0] + [0.0] * 19),
        ([1.0] * 10 + [0.4] * 20, [1.0] * 10 + [0.0] * 20),
        ([-0.1] * 10 + [-1.0] * 20, [1.0] * 10 + [0.0] * 20),
        ([1.0] * 10 + ([0.9] * 15 + [0.0]) * 4, [1.0] * 10 + [0.0] * 64),
    ],
    ids=["since the start", "for a few steps", "learnt", "a reward is at its most", "a hinge"],
)
def test_no_gradient_at_all_may_be_right(losses: list[float], levels: list[float]) -> None:
    assert silent(judge_rows(Vanishing(), net(), dying(losses, levels)))


@pytest.mark.parametrize(
    ("losses", "levels"),
    [
        (np.geomspace(1, 1e-8, 100), np.geomspace(1, 1e-8, 100)),
        (0.99 + 0.01 * np.geomspace(1, 1e-8, 100), np.geomspace(1, 1e-8, 100)),
        ([-0.1] * 50 + [0.0] * 50, [1.0] * 50 + [0.0] * 50),
        ([-0.1] * 50 + [0.0] * 50, [1.0] * 50 + [1e-9] * 50),
        ([0.69] * 100, np.geomspace(1, 1e-3, 100)),
        ([0.69] * 100, [1.0] * 95 + [1e-9] * 5),
    ],
    ids=["interpolation", "convergence to the noise", "solved", "nearly solved", "a smaller fall", "for some steps"],
)
def test_convergence_is_healthy(losses: Sequence[float], levels: Sequence[float]) -> None:
    assert silent(judge_rows(Vanishing(), net(), dying(losses, levels)))


def test_exploding_gradual() -> None:
    outcome = judge_rows(Exploding(), net(8), [{"signals": 10 ** np.linspace(4.9, 0, 8)}] * 3)
    assert outcome[:2] == [None, None]
    found = only(outcome[2])
    assert (found.severity, found.layer, found.sites) == (Severity.WARNING, "fc0", ("fc0", "fc1"))
    assert found.message == (
        "The backward signal of layer fc0 is 3162 times stronger than that of layer fc7; up to 1000 is normal. It "
        "grows gradually, by 3.2 times a layer: most often the initial weights are too large, and there is no norm."
    )
    assert found.remedy == "nn.init.kaiming_normal_ for the weights."


def test_exploding_abrupt_names_the_edge() -> None:
    found = only(judge_rows(Exploding(), net(), [{"signals": [2e4, 1e4, 2e4, 1, 1, 1]}] * 3)[-1])
    assert (found.layer, found.sites) == ("fc2", ("fc0", "fc1", "fc2"))
    assert "Most is gained between layers fc3 and fc2: a factor, or large weights." in found.message


@pytest.mark.parametrize(("peak", "severity"), [(1e6, Severity.WARNING), (1e33, Severity.ERROR), (INF, Severity.ERROR)])
def test_an_overwhelming_explosion_is_reported_at_once(peak: float, severity: Severity) -> None:
    assert only(judge_rows(Exploding(), net(4), [{"signals": [peak, peak, 1, 1]}])[0]).severity is severity


@pytest.mark.parametrize(
    "signals",
    [[1e9, 1, 1, 1, 1, 1], [1, 1, 1e9, 1, 1, 1], [1e2, 1e2, 1, 1, 1, 1], [10, 10, 1, 1, 0, 0], 10 ** np.arange(6.0)],
    ids=["one rescaled layer", "one inside", "a wide spread", "a dead end", "vanishing"],
)
def test_exploding_stays_silent(signals: Any) -> None:
    assert silent(judge_rows(Exploding(), net(), [{"signals": signals}] * 5))


def test_a_gradient_of_one_of_several_optimizers_that_grew() -> None:
    ours = {"codes": dict.fromkeys(["fc0", "fc1"], Missing.OTHER_OPTIMIZER), "optimizer": 0}
    theirs = {"codes": {"fc2": Missing.OTHER_OPTIMIZER}, "gradients": 1.0, "loss": 1.0, "optimizer": 1}
    rows = [row for own in dying([1.0] * 20 + [5.0] * 20, [1.0] * 20 + [3e3] * 20) for row in ({**own, **ours}, theirs)]
    found = only(judge_rows(Exploding(), net(3), rows)[-2])
    assert (found.layer, found.sites) == ("fc2", ("fc2",))
    assert found.message == (
        "The gradient of layer fc2, all that this optimizer holds, grew from a norm of 1 to 3000 and its loss rose "
        "with it, from 1 to 5: the steps are too large for this loss."
    )


@pytest.mark.parametrize(("height", "severity"), [(3e3, Severity.WARNING), (1e31, Severity.ERROR)])
def test_a_gradient_that_is_about_to_overflow(height: float, severity: Severity) -> None:
    outcome = judge_rows(Exploding(), net(), dying([1.0] * 20 + [5.0] * 20, [1.0] * 20 + [height] * 20))
    assert only(outcome[-1]).severity is severity
    assert silent(judge_rows(Exploding(), net(), dying([1.0] * 20 + [5.0] * 20, [1.0] * 38 + [height] * 2)))


@pytest.mark.parametrize(
    ("loss", "severity"), [(5.0, Severity.WARNING), (INF, Severity.ERROR), (0.5, None), (1.0, None)]
)
def test_a_gradient_that_grew_with_its_loss(loss: float, severity: Severity | None) -> None:
    outcome = judge_rows(Exploding(), net(), dying([1.0] * 20 + [loss] * 20, [1.0] * 20 + [3e3] * 20))
    if severity is None:
        assert silent(outcome)
        return
    found = only(outcome[-1])
    assert (found.severity, found.sites) == (severity, ())
    assert found.message == (
        f"The total gradient norm grew from 2.4 to 7300 and the loss rose with it, from 1 to {loss:.3g}: "
        "the steps are too large for this loss."
    )
    assert (found.onset, found.headline) == (20, "the gradient norm grew from 2.4 to 7300")
    assert found.remedy == (
        "a smaller lr in configure_optimizers, or Trainer(gradient_clip_val=2.4), the usual norm before."
    )
    small = [{**row, "updates": 0.05} for row in dying([1.0] * 20 + [loss] * 20, [1.0] * 20 + [3e3] * 20)]
    assert silent(judge_steps(Exploding(), net(), small)), "its targets have grown"
    upwards = [{**row, "maximize": 1.0} for row in dying([1.0] * 20 + [loss] * 20, [1.0] * 20 + [3e3] * 20)]
    found = only(judge_rows(Exploding(), net(), upwards)[-1])
    assert found.message.endswith(": the optimizer goes up the loss, not down (maximize=True).")
    assert found.remedy == "maximize=False in configure_optimizers, or a loss with the other sign."


@pytest.mark.parametrize(
    ("rule", "far", "weights"), [(Vanishing(), FADING, 1.0), (Exploding(), 10 ** np.linspace(6, 0, 6), 20.0)]
)
def test_weights_that_have_not_changed_have_not_become_anything(rule: Any, far: Any, weights: float) -> None:
    rows = [{"signals": 1.0, "weights": weights}] * 5 + [{"signals": far, "weights": weights}] * 3
    found = only(judge_rows(rule, net(), rows)[-1])
    assert found.onset == 3
    assert f": the weights are too {'small' if weights == 1.0 else 'large'}, and there is no norm." in found.message


@pytest.mark.parametrize("seed", range(5))
def test_depth_is_dated_at_the_first_agreeing_sample(seed: int) -> None:
    """Samples are some steps apart; what began later is not in the initial weights."""
    every, step = (int(np.random.default_rng([seed, i]).integers(1, high)) for i, high in enumerate((6, 40)))
    rows: list[dict[str, Any]] = []
    for place in range(step + 4 * every):
        far = {Vanishing: FADING, Exploding: 10 ** np.linspace(6, 0, 6)}
        rows.append({"place": place, "far": far if place >= step else dict.fromkeys(far, 1.0)})
    begun = -(-step // every) * every
    for rule, before, after, words in (
        (Vanishing, 2.0, 1.0, "become too small"),
        (Exploding, 10.0, 20.0, "become too large"),
    ):
        reported = [
            {"signals": row["far"][rule], "weights": before if row["place"] < step else after}
            if row["place"] % every == 0
            else {"loss": 1.0}
            for row in rows
        ]
        outcome = judge_rows(rule(), net(), reported)
        first = next(place for place, found in enumerate(outcome) if found)
        found = only(outcome[first])
        assert first + 1 - found.onset == begun
        assert (words in found.message) == (begun > 0)
        assert ("initial weights" in found.message) == (begun == 0)
        assert re.search("times (weaker|stronger) than", found.headline)
