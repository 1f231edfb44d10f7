"""The fault zoo: its labels, its peers, its score, and a quick part of it under GradWatch."""

from __future__ import annotations

import dataclasses
import inspect
import math
import sys
from functools import cache
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.zoo import book, page
from benchmarks.zoo.__main__ import chosen
from benchmarks.zoo.book import Book, tasks
from benchmarks.zoo.case import FAULTS, HEALTHY, run, unhealthy
from benchmarks.zoo.catalogue import CASES, FAMILIES, halves
from benchmarks.zoo.peer_thresholds import PEERS
from benchmarks.zoo.remedies import treated
from benchmarks.zoo.score import doubts, remedies, score
from benchmarks.zoo.trace import Trace, Tracer
from benchmarks.zoo.trial import GRADWATCH, NOTE, Alarm, Outcome, Task, attempt

import quick
from gradwatch import GradWatch
from gradwatch.core.alert import Alert, Severity
from gradwatch.rules import default_rules

RULES = {rule.name for rule in default_rules()}
QUICK_UNHEALTHY = [name for name, case in CASES.items() if case.quick and case.unhealthy and case.fault in RULES]
QUICK_HEALTHY = [name for name, case in CASES.items() if case.quick and not case.unhealthy]


@cache
def traced(name: str) -> Trace:
    """Of the first 60 steps: a peer that complains of these trainings does so by the 50th."""
    tracer, fit = Tracer(), CASES[name].build(0)
    run(dataclasses.replace(fit, batches=fit.batches[:60]), [tracer])
    return tracer.trace


@cache
def under_gradwatch(name: str) -> Outcome:
    """What a case comes to as it is."""
    return attempt(CASES[name], Task(name, 0, False, "gradwatch"))


def test_there_is_enough_of_everything() -> None:
    faults = [case.fault for case in CASES.values()]
    assert sum(case.unhealthy for case in CASES.values()) >= 45
    assert faults.count(HEALTHY) >= 55
    assert all(faults.count(fault) >= 2 for fault in FAULTS), "each half of each class needs one"
    assert {case.family for case in CASES.values()} == set(FAMILIES)
    assert {case.fault for case in CASES.values() if case.quick} == {*FAULTS, HEALTHY}
    assert set(quick.ZOO) <= {*QUICK_UNHEALTHY, *QUICK_HEALTHY}


def test_halves_split_every_class_evenly() -> None:
    split = halves()
    assert set(split) == set(CASES)
    for fault in (*FAULTS, HEALTHY):
        own = [split[name] for name, case in CASES.items() if case.fault == fault]
        assert own.count("tuned") - own.count("held_out") in (0, 1)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.faulty_layers])
def test_faulty_layers_are_layers_of_their_model(name: str) -> None:
    modules = dict(CASES[name].build(0).module.named_modules())
    unknown = CASES[name].faulty_layers - set(modules)
    held = {f"{at}.{attribute}" for at, module in modules.items() for attribute in vars(module)}  # in a list or dict
    assert CASES[name].faulty_layers & set(modules) or all(each.partition("[")[0] in held for each in unknown), (
        f"none of {sorted(unknown)} is there"
    )


@pytest.mark.slow
def test_a_case_is_the_same_under_the_same_seed() -> None:
    def weights(seed: int) -> list[float]:
        fit = CASES["missing_value_in_a_batch"].build(seed, fixed=True)
        before = fit.yardstick()
        run(dataclasses.replace(fit, batches=fit.batches[:20]))
        return [before, fit.yardstick(), *(float(p.detach().sum()) for p in fit.module.parameters())]

    assert weights(3) == weights(3)
    assert weights(3) != weights(4)


def test_wrong_registrations_are_refused() -> None:
    with pytest.raises(ValueError, match="is no fault; there is nonfinite"):
        unhealthy("boredom")
    with pytest.raises(ValueError, match="two cases are called 'sigmoid_stack'"):
        unhealthy("vanishing")(CASES["sigmoid_stack"].make)
    with pytest.raises(ValueError, match="says in its docstring"):
        unhealthy("vanishing")(lambda fixed: CASES["sigmoid_stack"].make(fixed))


@pytest.mark.parametrize("name", quick.cases(QUICK_UNHEALTHY, quick.ZOO))
def test_a_case_with_a_fault_raises_its_alert(name: str) -> None:
    outcome, case = under_gradwatch(name), CASES[name]
    said = score(GRADWATCH, [outcome]).answers[0]
    assert said.right, [(alarm.kind, alarm.step, alarm.text) for alarm in outcome.alarms]
    assert said.layer_among or not case.faulty_layers
    assert not [alarm.text for alarm in outcome.alarms if alarm.kind == NOTE]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*quick.ZOO} & {*QUICK_UNHEALTHY}))
def test_a_case_learns_worse_with_its_fault_than_without(name: str) -> None:
    fit = CASES[name].build(0, fixed=True)
    before = fit.yardstick()
    steps = run(fit).global_step
    fixed = Outcome(Task(name, 0, True, "peers"), steps, before, fit.yardstick(), ())
    assert not [doubt.why for doubt in doubts([under_gradwatch(name), fixed])]


@pytest.mark.parametrize("name", quick.cases(QUICK_HEALTHY, quick.ZOO))
def test_a_healthy_case_raises_no_alert(name: str) -> None:
    outcome = under_gradwatch(name)
    assert not [(alarm.kind, alarm.step, alarm.text) for alarm in outcome.alarms]
    assert outcome.after < 0.9 * outcome.before
    assert not outcome.failed


def test_the_tracer_leaves_the_training_as_it_is() -> None:
    def weights(callbacks: list[Tracer]) -> list[float]:
        fit = CASES["language_model"].build(0)
        run(dataclasses.replace(fit, batches=fit.batches[:10]), callbacks)
        return [float(p.detach().double().sum()) for p in fit.module.parameters()]

    tracer = Tracer()
    assert weights([tracer]) == weights([])
    assert [step.step for step in tracer.trace.steps] == list(range(10))
    step = tracer.trace.steps[-1]
    assert step.layers["net.head"]["grad_norm"] > 0
    assert 0 < step.layers["net.head"]["update_ratio"] < 1
    assert math.isfinite(step.loss)
    assert "net.blocks.0.attention.query" in step.outputs


PEERS_SAY = [
    ("SageMaker Debugger, all rules", "bias_far_below_zero", "DeadRelu", "net.act2"),
    ("DeepDiagnosis", "bias_far_below_zero", "numerical_forward", "net.act2"),
    ("DeepDiagnosis", "bytes_into_tanh", "saturated_activation", "net.act1"),
    ("norm < 1e-7 or > 100", "missing_value_in_a_batch", "high", "net.fc1"),
    ("SageMaker Debugger, gradient rules", "missing_value_in_a_batch", "ExplodingTensor", "net.fc1"),
    ("HF DebugUnderflowOverflow", "missing_value_in_a_batch", "overflow", "net.fc1"),
    ("SageMaker Debugger, all rules", "optimizer_has_the_head_only", "VanishingGradient", None),
    ("SageMaker Debugger, all rules", "rate_of_a_billionth", "UnchangedTensor", "net.fc1"),
    ("norm < 1e-7 or > 100", "sigmoid_stack", "low", "net.fc1"),
    ("SageMaker Debugger, gradient rules", "sigmoid_stack", "VanishingGradient", "net.fc1"),
    ("AutoTrainer", "sigmoid_stack", "vanish", "net.fc1"),
    ("HF DebugUnderflowOverflow", "sigmoid_stack", "overflow", None),
]
"""Peer, case, what it complains of, and the layer; None where it does not."""


@pytest.mark.slow
def test_peers_say_what_their_rules_say() -> None:
    for system, case, kind, layer in PEERS_SAY:  # in one test: several are of one training
        peer = next(peer for peer in PEERS if peer.name == system)
        said = {complaint.kind: complaint for complaint in peer.judge(traced(case))}
        assert (said[kind].layer if kind in said else None) == layer, (system, case, kind)


def test_every_complaint_of_a_peer_stands_for_faults_that_exist() -> None:
    for peer in PEERS:
        assert set().union(*peer.stands_for.values()) <= set(FAULTS), peer.name
        assert peer.source in ("common practice",) or peer.source.startswith("https://")
        assert inspect.getdoc(peer.judge), peer.name


def outcome(
    case: str, *alarms: tuple[str, int, str], fixed: bool = False, eye: str = "gradwatch", after: float = 0.1
) -> Outcome:
    found = tuple(
        Alarm(GRADWATCH, kind, step, layer, (layer,), (kind,), kind != "note") for kind, step, layer in alarms
    )
    return Outcome(Task(case, 0, fixed, eye), 100, 0.9, after, found)  # type: ignore[arg-type]


def test_the_score_counts_class_layer_delay_and_false_alerts() -> None:
    spike = CASES["batch_in_raw_units"]
    found = score(
        GRADWATCH,
        [
            outcome("sigmoid_stack", ("vanishing", 4, "net.fc2")),
            outcome("squeezed_features", ("vanishing", 2, "net.fc4")),
            outcome(spike.name, ("spike", spike.onset - 1, "")),
            outcome("plain_mlp", ("spike", 40, "net.fc1"), ("dead", 50, "")),
            outcome("plain_cnn"),
            outcome("sigmoid_stack", ("exploding", 1, ""), fixed=True),
            outcome("sigmoid_stack", ("vanishing", 0, ""), eye="peers"),
        ],
    )
    assert (len(found.found), len(found.answers)) == (2, 3), "an alarm before the onset is no answer"
    assert [answer.layer_first for answer in found.with_layers] == [True, False]
    assert found.delay == 3
    assert [count for _, count in found.healthy] == [2, 0]
    assert found.per_thousand_steps == 10
    assert [count for _, count in found.fixed] == [1]


def test_an_effect_counts_as_found_and_is_no_incident() -> None:
    head = Alarm(GRADWATCH, "divergence", 31, "net.fc1", ("net.fc1",), ("divergence",), True)
    effect = Alarm(GRADWATCH, "dead", 56, "net.fc3", ("net.fc3",), ("dead",), False, "", "divergence")
    both = Outcome(Task("one_step_too_long", 0, False, "gradwatch"), 100, 0.9, 0.9, (head, effect))
    found = score(GRADWATCH, [both])
    (answer,) = found.found
    assert (answer.at_the_head, answer.incidents, answer.delay, answer.layer_first) == (False, 1, 25, True)
    assert page.under_another_head([both]) == [
        (halves()["one_step_too_long"].replace("_", " "), "`dead`", "one_step_too_long", "1/1", "divergence")
    ]
    assert not page.several_incidents([both])
    own = dataclasses.replace(effect, loud=True, follows="")
    (row,) = page.several_incidents([dataclasses.replace(both, alarms=(head, own))])
    assert row[2:] == ("one_step_too_long", "1/1", "dead at 56, divergence at 31")


def test_a_remedy_cures_where_the_alert_is_gone_and_the_training_learns() -> None:
    unhealthy, fixed = outcome("sigmoid_stack", after=0.9), outcome("sigmoid_stack", fixed=True, after=0.1)

    def fixes(rule: str = "vanishing", *alarms: tuple[str, int, str], after: float = 0.2) -> bool:
        tried = outcome("sigmoid_stack", *alarms, eye="remedy", after=after)
        (one,) = remedies([unhealthy, fixed, dataclasses.replace(tried, remedy="nn.ReLU", remedied=rule)])
        return one.fixes

    assert fixes()
    assert not fixes(after=0.31)
    assert not fixes(after=math.nan)
    assert not fixes("vanishing", ("vanishing", 2, "net.fc1"))
    assert fixes("spike", ("spike", 2, "net.fc1"))
    assert not fixes("")
    assert not remedies([unhealthy, fixed, outcome("sigmoid_stack", eye="remedy")]), "nothing was proposed"


def proposes(remedy: str, layer: str = "net.fc1", sites: tuple[str, ...] = ()) -> Alert:
    return Alert("dead", Severity.ERROR, layer, sites, 0, 0, 1.0, 1.0, "", remedy)


def test_remedies_are_applied_as_they_are_read() -> None:
    def rates(case: str, remedy: str) -> list[float]:
        fit = treated(CASES[case].build(0), proposes(remedy))
        assert fit is not None
        made = fit.module.configure_optimizers()
        return [group["lr"] for group in (made["optimizer"] if isinstance(made, dict) else made).param_groups]

    assert rates("adam_with_sgd_rate", "lr=0.003 in configure_optimizers: it was measured.") == [0.003]
    assert rates("rate_of_a_billionth", "a usual lr in configure_optimizers: 1e-3 for Adam, or 0.1 for SGD.") == [1e-3]
    assert rates(
        "group_with_rate_zero", "lr=0.005, the highest of all groups, for the parameter group of layer net.fc1."
    ) == [0.005, 0.005]
    clipped = treated(CASES["plain_mlp"].build(0), proposes("Trainer(gradient_clip_val=3.3), the highest norm."))
    assert clipped is not None
    assert clipped.options["gradient_clip_val"] == 3.3
    dead = treated(
        CASES["bias_far_below_zero"].build(0), proposes("nn.init.zeros_ for the bias of layer net.fc2, or another.")
    )
    assert dead is not None
    assert not dead.module.get_parameter("net.fc2.bias").any()
    assert treated(CASES["plain_mlp"].build(0), proposes("a look at what came in.")) is None
    straight = "a weight above 0 for the loss, or straight through: x + (round(x) - x).detach()."
    assert treated(CASES["quantised_without_bypass"].build(0), proposes(straight, "net.middle")) is not None
    assert treated(CASES["second_task_weighs_nothing"].build(0), proposes(straight, "net.parity")) is None


def test_labels_that_the_measurements_do_not_bear_out_are_doubted() -> None:
    sound = [outcome("sigmoid_stack", after=0.9), outcome("sigmoid_stack", fixed=True), outcome("plain_mlp")]
    assert not doubts(sound)
    assert not doubts([outcome("sigmoid_stack", after=math.nan), outcome("sigmoid_stack", fixed=True)])
    harmless = doubts([outcome("sigmoid_stack", after=0.11), outcome("sigmoid_stack", fixed=True)])
    assert [doubt.why.split(":")[0] for doubt in harmless] == ["learns as well as its fixed version"]
    assert [doubt.why for doubt in doubts([outcome("plain_mlp", after=0.85)])] == ["it does not learn: 0.9 -> 0.85"]


def test_the_book_goes_on_where_it_was_and_forgets_other_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = tasks(["sigmoid_stack", "plain_mlp"], [0])
    assert len(wanted) == 10
    first = Book(tmp_path)
    said = outcome("sigmoid_stack", ("vanishing", 4, "net.fc2"), after=math.nan)
    first.add(said)
    with first.path.open("a") as file:
        file.write('{"torn')
    again = Book(tmp_path)
    (read,) = again.outcomes(wanted)
    assert math.isnan(read.after)
    assert dataclasses.replace(read, after=0.0) == dataclasses.replace(said, after=0.0)
    assert [task in again for task in wanted].count(True) == 1
    monkeypatch.setattr(book, "fingerprint", lambda case, eye: "of other code")
    assert not Book(tmp_path).outcomes(wanted)


def test_the_report_names_what_went_wrong() -> None:
    found = [
        outcome("sigmoid_stack", ("exploding", 7, ""), after=0.9),
        outcome("tanh_small_start", ("vanishing", 2, "net.head"), after=0.9),
        outcome("sigmoid_stack", fixed=True),
        outcome("plain_mlp", ("spike", 40, "net.fc1")),
        outcome("plain_cnn", (NOTE, 0, "")),
    ]
    text = page.report(found)
    half = halves()["sigmoid_stack"].replace("_", " ")
    assert f"| {half} | `vanishing` | sigmoid_stack | 1/1 | exploding at 7 |" in text
    assert "| tanh_small_start | net.head |" in text
    assert "| healthy | plain_mlp | 1/1 | spike at 40 |" in text
    assert "| plain_cnn | seed 0 |" in text
    written = page.with_report(f"above\n{page.BEGIN}\nold\n{page.END}\nbelow", text)
    assert "old" not in written
    assert written.startswith("above")
    with pytest.raises(ValueError, match="no place for the zoo's tables"):
        page.with_report("nothing", text)
    page.with_report(page.DOCS.read_text(encoding="utf-8"), text)


def test_cases_are_chosen_by_name_fault_and_half() -> None:
    assert chosen(["sigmoid_s*"]) == ["sigmoid_stack"]
    assert {CASES[name].fault for name in chosen(["spike", "dead"])} == {"spike", "dead"}
    assert sorted(chosen(["*"], "tuned") + chosen(["*"], "held_out")) == sorted(CASES)
    with pytest.raises(SystemExit, match="no case fits"):
        chosen(["unicorn"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["rare_class_weighs_all", "momentum_too_long", "one_step_too_long", "decimal_point_slips"]
)
def test_the_worst_runs_say_little_in_300_steps(name: str) -> None:
    fit = CASES[name].build(0)
    again = -(-300 // len(fit.batches))
    watch = GradWatch(sinks=())
    trainer = run(dataclasses.replace(fit, batches=(fit.batches * again)[:300]), [watch])
    assert trainer.global_step == 300
    loud = [(alert.rule, alert.step) for alert in watch.alerts if alert.severity is not Severity.NOTICE]
    assert 1 <= len(loud) <= 3, loud


def test_the_page_says_which_seeds_each_had() -> None:
    first, second = outcome("sigmoid_stack", eye="gradwatch"), outcome("sigmoid_stack", eye="remedy")
    third = dataclasses.replace(first, task=dataclasses.replace(first.task, seed=1))
    assert page.seeds_text([first, third, second]) == "GradWatch under seeds 0, 1; remedies under seed 0"
    assert page.watching([first]) == [GRADWATCH]
    assert len(page.classes_table([first])[0]) == 2
