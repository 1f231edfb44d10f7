"""From findings to incidents: what opens, joins, closes and comes back, and the words that people read."""

import json
from dataclasses import replace

import numpy as np
import pytest

from gradwatch.core.alert import Alert, Effect, Finding, Severity, Verdict, ranked, short_list, wrapped
from gradwatch.rules.incidents import IncidentTracker

VANISHING = Finding(
    rule="vanishing",
    severity=Severity.WARNING,
    layer="fc0",
    sites=("fc0", "fc1"),
    value=6.0,
    threshold=3.5,
    message="The backward signal fades.",
    remedy="nn.ReLU instead of nn.Sigmoid.",
)
NONFINITE = replace(VANISHING, rule="nonfinite", severity=Severity.ERROR, layer="fc2", sites=("fc2",))


def run(
    tracker: IncidentTracker, steps: range, *found: Finding, rules: tuple[str, ...] = ("vanishing",)
) -> list[Alert]:
    """Feed the same findings over `steps`; what was opened."""
    by_rule = {rule: [finding for finding in found if finding.rule == rule] for rule in rules}
    return [alert for step in steps for alert in tracker.update(step, by_rule).opened]


def test_an_incident_opens_once_however_long_it_lasts() -> None:
    tracker = IncidentTracker()
    opened = run(tracker, range(3, 60), VANISHING)
    assert [(alert.rule, alert.step, alert.closed_step) for alert in opened] == [("vanishing", 3, None)]
    assert tracker.open_faults == tracker.alerts == tuple(opened)


def test_it_closes_after_clean_evaluations_at_the_step_it_was_last_seen() -> None:
    tracker = IncidentTracker(close_after=20)
    run(tracker, range(5), VANISHING)
    run(tracker, range(5, 24))
    assert tracker.open_faults
    closed = tracker.update(24, {"vanishing": []}).closed
    assert [alert.closed_step for alert in closed] == [4]
    assert not tracker.open_faults


def test_a_rule_that_judges_samples_alone_closes_after_a_few_of_them() -> None:
    tracker = IncidentTracker(close_after=20)
    run(tracker, range(1), VANISHING)
    for step in range(1, 320):
        tracker.update(step, {"vanishing": None if step % 64 else []})
    assert tracker.open_faults, "four samples without it"
    assert [alert.closed_step for alert in tracker.update(320, {"vanishing": []}).closed] == [0]


def test_a_relapse_starts_the_clean_count_again() -> None:
    tracker = IncidentTracker(close_after=20)
    run(tracker, range(1), VANISHING)
    run(tracker, range(1, 20))
    run(tracker, range(20, 21), VANISHING)
    run(tracker, range(21, 40))
    assert tracker.open_faults


def test_a_record_that_cannot_tell_neither_opens_nor_heals() -> None:
    tracker = IncidentTracker(close_after=2)
    assert tracker.update(0, {"vanishing": None}).opened == ()
    run(tracker, range(1, 2), VANISHING)
    for step in range(2, 50):
        assert tracker.update(step, {"vanishing": None}).closed == ()
    assert tracker.open_faults


def test_layers_that_fall_ill_later_join_the_open_incident() -> None:
    tracker = IncidentTracker()
    run(tracker, range(1), VANISHING)
    assert not run(tracker, range(1, 2), replace(VANISHING, sites=("fc1", "fc2")))
    assert tracker.alerts[0].sites == ("fc0", "fc1", "fc2")


def test_what_is_said_of_each_group_of_layers_that_is_found_at_once() -> None:
    first = replace(VANISHING, headline="it fades")
    other = replace(
        first,
        layer="fc3",
        sites=("fc3",),
        message="Layer fc3 is another matter.",
        headline="it is another",
        remedy="b.",
    )
    (alert,) = run(IncidentTracker(), range(1), replace(first, remedy="a."), other, replace(first, remedy="a."))
    assert (alert.message, alert.headline) == ("The backward signal fades. Layer fc3 is another matter.", "")
    assert alert.remedy == "a; b."
    (alert,) = run(IncidentTracker(), range(1), first, replace(first, sites=("fc4",)))
    assert (alert.message, alert.headline) == (VANISHING.message, "it fades")


def test_notices_about_other_layers_are_no_part_of_what_is_louder() -> None:
    loud = replace(VANISHING, layer="a", sites=("a",), severity=Severity.WARNING)
    quiet = replace(VANISHING, layer="b", sites=("b",), severity=Severity.NOTICE, message="It is no matter.")
    tracker = IncidentTracker(close_after=3)
    run(tracker, range(3), loud, quiet)
    (alert,) = tracker.alerts
    assert (alert.sites, alert.message) == (("a",), VANISHING.message)
    run(tracker, range(3, 10), quiet)
    first, second = tracker.alerts
    assert (first.sites, first.closed_step) == (("a",), 2)
    assert (second.sites, second.severity, second.closed_step) == (("b",), Severity.NOTICE, None)
    tracker = IncidentTracker()
    run(tracker, range(1), loud)
    run(tracker, range(1, 2), replace(quiet, sites=("a", "b")))
    assert [alert.sites for alert in tracker.alerts] == [("a", "b")]
    tracker = IncidentTracker()
    run(tracker, range(1), quiet)
    run(tracker, range(1, 2), replace(quiet, sites=("c",)))
    assert [alert.sites for alert in tracker.alerts] == [("b", "c")], "no more than they"


def test_layers_that_join_are_named_in_the_models_order() -> None:
    tracker, order = IncidentTracker(), {"a": 1, "b": 2, "c": 3}
    tracker.update(0, {"vanishing": [replace(VANISHING, layer="c", sites=("c",))]}, order)
    tracker.update(1, {"vanishing": [replace(VANISHING, sites=("a", "b"))]}, order)
    assert tracker.alerts[0].sites == ("a", "b", "c")
    assert tracker.alerts[0].layer == "c", "it began there"


def test_an_incident_worsens_but_does_not_improve() -> None:
    tracker = IncidentTracker()
    run(tracker, range(1), VANISHING)
    run(tracker, range(1, 2), replace(VANISHING, severity=Severity.ERROR))
    run(tracker, range(2, 3), VANISHING)
    assert tracker.alerts[0].severity is Severity.ERROR


def test_within_the_cooldown_it_is_the_same_incident_reopened_in_silence() -> None:
    tracker = IncidentTracker(close_after=20, reopen_within=200)
    run(tracker, range(1), VANISHING)
    run(tracker, range(1, 30))
    assert not run(tracker, range(200, 201), VANISHING)
    assert [(alert.times, alert.closed_step) for alert in tracker.alerts] == [(2, None)]
    run(tracker, range(201, 230))
    assert not run(tracker, range(230, 231), replace(VANISHING, layer="total", sites=())), "it is in all layers"


def test_within_the_cooldown_the_fault_of_other_layers_is_another_incident() -> None:
    """The words of the first are about its own layers, in which the fault is over."""
    tracker, other = IncidentTracker(close_after=20, reopen_within=200), replace(VANISHING, layer="z", sites=("z",))
    run(tracker, range(1), VANISHING)
    run(tracker, range(1, 30))
    assert len(run(tracker, range(30, 31), other)) == 1
    run(tracker, range(31, 60))
    assert not run(tracker, range(60, 61), VANISHING)
    run(tracker, range(61, 90))
    assert not run(tracker, range(90, 91), other)
    assert [(alert.layer, alert.times, alert.closed_step) for alert in tracker.alerts] == [
        (VANISHING.layer, 2, 60),
        ("z", 2, None),
    ]
    spikes = IncidentTracker(close_after=5)
    run(spikes, range(1), SPIKE, rules=("spike",))
    run(spikes, range(1, 30), rules=("spike",))
    assert not run(spikes, range(30, 31), replace(SPIKE, layer="z", sites=("z",)), rules=("spike",)), "over at once"
    run(spikes, range(31, 60), rules=("spike",))
    notice = replace(SPIKE, layer="y", sites=("y",), severity=Severity.NOTICE)
    assert len(run(spikes, range(60, 61), notice, rules=("spike",))) == 1, "no part of what is louder"


@pytest.mark.parametrize(
    ("finding", "incidents"), [(VANISHING, 2), (NONFINITE, 1), (replace(VANISHING, rule="spike"), 1)]
)
def test_a_fault_that_wanders_from_layer_to_layer_is_not_reported_each_time(finding: Finding, incidents: int) -> None:
    """Of sixteen experts one after the other, every 30 steps."""
    tracker, opened = IncidentTracker(), list[Alert]()
    for step in range(900):
        layer = f"experts.{step // 30 % 16}"
        found = [replace(finding, layer=layer, sites=(layer,))] * (step % 30 == 0)
        opened += run(tracker, range(step, step + 1), *found, rules=(finding.rule,))
    assert len(opened) == incidents


def test_after_the_cooldown_it_is_a_new_incident() -> None:
    tracker = IncidentTracker(close_after=20, reopen_within=200)
    run(tracker, range(1), VANISHING)
    run(tracker, range(1, 30))
    assert len(run(tracker, range(201, 202), VANISHING)) == 1
    assert len(tracker.alerts) == 2


@pytest.mark.parametrize("together", [True, False])
def test_what_follows_from_an_open_cause_is_its_effect(together: bool) -> None:
    tracker, rules = IncidentTracker(), ("nonfinite", "vanishing")
    if not together:
        run(tracker, range(1), NONFINITE, rules=rules)
    run(tracker, range(1, 2), NONFINITE, VANISHING, rules=rules)
    (alert,) = tracker.alerts
    assert (alert.rule, alert.severity) == ("nonfinite", Severity.ERROR)
    assert alert.effects == (Effect("vanishing", VANISHING.sites, "fc0", 1, 1),)


def test_an_effect_stays_with_its_cause_where_another_is_found_later() -> None:
    tracker = IncidentTracker()
    tracker.update(5, {"nonfinite": [NONFINITE]})
    tracker.update(6, {"vanishing": [VANISHING]}, onset=lambda finding: 3)  # a rule may need some steps to be certain
    tracker.update(7, {"bad_head": [replace(VANISHING, rule="bad_head")]}, onset=lambda finding: 3)
    assert [(alert.rule, len(alert.effects)) for alert in tracker.alerts] == [("nonfinite", 1), ("bad_head", 0)]


@pytest.mark.parametrize("after", [50, 51])
def test_a_cause_explains_what_comes_soon_after_it_too(after: int) -> None:
    tracker, rules = IncidentTracker(close_after=20, effects_within=50), ("nonfinite", "vanishing")
    run(tracker, range(4), NONFINITE, rules=rules)
    run(tracker, range(4, 3 + after), rules=rules)
    assert not tracker.open_faults
    opened = run(tracker, range(3 + after, 4 + after), VANISHING, rules=rules)
    assert [alert.rule for alert in opened] == ["vanishing"] * (after > 50)
    assert [len(alert.effects) for alert in tracker.alerts] == ([1] if after == 50 else [0, 0])


@pytest.mark.parametrize(("begun", "follows"), [(2, True), (3, True), (4, False)])
def test_what_began_while_its_cause_lasted_is_its_effect_however_late_it_is_found(begun: int, follows: bool) -> None:
    tracker, rules = IncidentTracker(close_after=20, effects_within=50), ("nonfinite", "vanishing")
    run(tracker, range(2, 4), NONFINITE, rules=rules)
    run(tracker, range(4, 100), rules=rules)
    tracker.update(100, {"nonfinite": [], "vanishing": [VANISHING]}, onset=lambda finding: begun)
    assert [len(alert.effects) for alert in tracker.alerts] == ([1] if follows else [0, 0])


def test_an_effect_grows_with_its_cause_and_never_becomes_louder() -> None:
    tracker, rules = IncidentTracker(), ("nonfinite", "vanishing")
    run(tracker, range(1), NONFINITE, VANISHING, rules=rules)
    more = replace(VANISHING, severity=Severity.ERROR, sites=("fc3",))
    found = {"nonfinite": [NONFINITE], "vanishing": [more]}
    (grown,) = tracker.update(1, found).grown
    assert grown.effects == (Effect("vanishing", (*VANISHING.sites, "fc3"), "fc0", 0, 0),)
    assert tracker.alerts == (grown,)
    assert [alert.severity for alert in tracker.open_faults] == [Severity.ERROR, Severity.NOTICE]


@pytest.mark.parametrize("begun", [3, 10, 12])
def test_an_incident_whose_cause_is_found_later_becomes_its_effect(begun: int) -> None:
    """Not so one that began before that cause."""
    tracker, rules = IncidentTracker(), ("nonfinite", "vanishing")
    run(tracker, range(10, 11), VANISHING, rules=rules)
    found = {"nonfinite": [NONFINITE], "vanishing": [VANISHING]}
    changes = tracker.update(20, found, onset=lambda finding: begun)
    assert [alert.rule for alert in changes.opened] == ["nonfinite"]
    if begun > 10:
        assert [alert.rule for alert in tracker.alerts] == ["vanishing", "nonfinite"]
        return
    (alert,) = tracker.alerts
    assert (alert.rule, alert.step, alert.noticed) == ("nonfinite", begun, 20)
    assert alert.effects == (Effect("vanishing", VANISHING.sites, "fc0", 10, 10),)
    assert [(one.rule, one.severity) for one in changes.closed] == [("vanishing", Severity.NOTICE)], "sinks know"


@pytest.mark.parametrize(("after", "follows"), [(50, True), (51, False)])
def test_an_incident_that_was_read_long_ago_keeps_its_words(after: int, follows: bool) -> None:
    """Though a cause is found that began before it."""
    tracker = IncidentTracker(effects_within=50)
    run(tracker, range(10, 11), VANISHING)
    tracker.update(10 + after, {"nonfinite": [NONFINITE]}, onset=lambda finding: 3)
    assert [alert.rule for alert in tracker.alerts] == ["vanishing"] * (not follows) + ["nonfinite"]


SPIKE, DIVERGENCE = replace(VANISHING, rule="spike"), replace(NONFINITE, rule="divergence")


@pytest.mark.parametrize(
    ("spike", "divergence", "cause"), [(30, 31, "spike"), (31, 30, "divergence"), (30, 30, "spike")]
)
@pytest.mark.parametrize("first", ["spike", "divergence"])
def test_of_two_that_may_each_be_the_cause_it_is_the_one_that_began_first(
    spike: int, divergence: int, cause: str, first: str
) -> None:
    """Whichever was found first."""
    tracker, begun = IncidentTracker(), {"spike": spike, "divergence": divergence}
    found = {"spike": [SPIKE], "divergence": [DIVERGENCE]}
    tracker.update(32, {first: found[first]}, onset=lambda finding: begun[finding.rule])
    tracker.update(33, found, onset=lambda finding: begun[finding.rule])
    (alert,) = tracker.alerts
    other = ({"spike", "divergence"} - {cause}).pop()
    assert (alert.rule, alert.step, alert.severity) == (cause, begun[cause], Severity.ERROR)
    assert [(effect.rule, effect.step) for effect in alert.effects] == [(other, begun[other])]


@pytest.mark.parametrize(("after", "alone"), [(10, False), (11, True)])
def test_a_spike_is_over_at_once_and_explains_little(after: int, alone: bool) -> None:
    tracker = IncidentTracker()
    run(tracker, range(1), SPIKE, rules=("spike",))
    run(tracker, range(1, after), rules=("spike",))
    opened = tracker.update(after, {"divergence": [DIVERGENCE]}).opened
    assert [alert.rule for alert in opened] == ["divergence"] * alone


def test_a_nan_of_the_batch_follows_from_nothing() -> None:
    tracker = IncidentTracker()
    run(tracker, range(3), DIVERGENCE, rules=("divergence",))
    tracker.update(3, {"divergence": [DIVERGENCE], "nonfinite": [replace(NONFINITE, independent=True)]})
    assert [(alert.rule, alert.effects) for alert in tracker.alerts] == [("divergence", ()), ("nonfinite", ())]


def test_an_incident_is_as_severe_and_as_long_as_what_follows_from_it() -> None:
    tracker, rules = IncidentTracker(close_after=5), ("spike", "divergence")
    run(tracker, range(1), SPIKE, rules=rules)
    assert [alert.severity for alert in tracker.alerts] == [Severity.WARNING]
    changes = tracker.update(2, {"spike": [], "divergence": [DIVERGENCE]})
    assert [(alert.rule, alert.severity) for alert in changes.worse] == [("spike", Severity.ERROR)]
    assert changes.worse == changes.grown
    run(tracker, range(3, 12), DIVERGENCE, rules=rules)
    assert [(alert.rule, alert.closed_step) for alert in tracker.alerts] == [("spike", None)]
    run(tracker, range(12, 20), rules=rules)
    assert [(alert.rule, alert.closed_step) for alert in tracker.alerts] == [("spike", 11)]


@pytest.mark.parametrize("open_until", [2, 40], ids=["closed", "open"])
def test_a_notice_does_not_silence_what_is_louder_in_the_same_rule(open_until: int) -> None:
    tracker = IncidentTracker(close_after=20, reopen_within=200)
    run(tracker, range(open_until), replace(VANISHING, severity=Severity.NOTICE))
    run(tracker, range(open_until, 40))
    louder = replace(VANISHING, layer="fc3", sites=("fc3",))
    changes = tracker.update(40, {"vanishing": [louder]}, onset=lambda finding: 30)
    assert [(alert.layer, alert.severity, alert.step) for alert in changes.opened] == [("fc3", Severity.WARNING, 30)]
    run(tracker, range(41, 70))
    assert not tracker.open_faults
    assert [alert.severity for alert in tracker.alerts] == [Severity.NOTICE, Severity.WARNING]
    assert tracker.alerts[0].closed_step == (1 if open_until == 2 else 40)


def test_what_is_louder_in_the_same_layers_does_not_come_back_with_the_words_of_a_notice() -> None:
    tracker = IncidentTracker(close_after=20, reopen_within=200)
    run(tracker, range(2), replace(VANISHING, severity=Severity.NOTICE, message="Next to nothing."))
    run(tracker, range(2, 40))
    (alert,) = tracker.update(40, {"vanishing": [VANISHING]}).opened
    assert (alert.severity, alert.step, alert.message) == (Severity.WARNING, 40, VANISHING.message)
    assert [(one.severity, one.closed_step, one.times) for one in tracker.alerts] == [
        (Severity.NOTICE, 1, 1),
        (Severity.WARNING, None, 1),
    ]


@pytest.mark.parametrize("first", ["divergence", "vanishing"])
def test_a_notice_explains_nothing_that_is_louder(first: str) -> None:
    tracker = IncidentTracker()
    found = {"divergence": [replace(DIVERGENCE, severity=Severity.NOTICE)], "vanishing": [VANISHING]}
    tracker.update(0, {first: found[first]})
    tracker.update(1, found, onset=lambda finding: 0)
    assert sorted(alert.rule for alert in tracker.alerts) == ["divergence", "vanishing"]


@pytest.mark.parametrize(("sites", "explained"), [(("fc0", "fc1", "fc2"), True), (("fc0",), False)])
def test_a_notice_about_layers_without_gradients_explains_that_no_signal_reaches_them(
    sites: tuple[str, ...], explained: bool
) -> None:
    """As where a library weighs a single variable; not in other layers."""
    tracker = IncidentTracker()
    disconnected = replace(VANISHING, rule="disconnected", severity=Severity.NOTICE, sites=sites)
    run(tracker, range(3), disconnected, rules=("disconnected",))
    run(tracker, range(3, 6), disconnected, VANISHING, rules=("disconnected", "vanishing"))
    rules = [(alert.rule, alert.severity) for alert in tracker.alerts]
    others = [("vanishing", Severity.WARNING)]
    assert rules == [("disconnected", Severity.NOTICE), *others[explained:]]


@pytest.mark.parametrize("severity", [Severity.WARNING, Severity.ERROR])
@pytest.mark.parametrize("clean", [0, 1])
def test_a_gradient_that_reaches_no_weight_explains_nothing_and_lends_no_words(severity: Severity, clean: int) -> None:
    """As where a loss scaler skips the step. If the next gradient is not finite either, it may not have."""
    first, worse, rules = replace(NONFINITE, severity=severity), replace(NONFINITE, message="It harms."), ("nonfinite",)
    tracker, harmless = IncidentTracker(), severity is Severity.WARNING
    run(tracker, range(3), first, rules=rules)
    run(tracker, range(3, 3 + clean), rules=rules)
    opened = run(tracker, range(4, 6), worse, rules=rules)
    assert [(alert.message, alert.step) for alert in opened] == [(worse.message, 4)] * (harmless and clean)
    assert tracker.alerts[-1].severity is Severity.ERROR
    tracker = IncidentTracker()
    run(tracker, range(3), first, rules=rules)
    assert len(run(tracker, range(3, 6), VANISHING)) == harmless


def test_a_spike_long_after_its_cause_is_its_own_incident() -> None:
    """Not an effect that comes back: it may have another cause each time."""
    tracker, rules = IncidentTracker(close_after=5, effects_within=50), ("divergence", "spike")
    run(tracker, range(1), DIVERGENCE, rules=rules)
    run(tracker, range(1, 3), DIVERGENCE, SPIKE, rules=rules)
    run(tracker, range(3, 60), rules=rules)
    opened = run(tracker, range(60, 61), SPIKE, rules=rules)
    assert [(alert.rule, alert.step, alert.severity) for alert in opened] == [("spike", 60, Severity.WARNING)]


@pytest.mark.parametrize(("cause", "incidents"), [("divergence", 1), ("bad_head", 3)])
def test_a_spike_long_after_a_divergence_is_its_effect_while_others_last(cause: str, incidents: int) -> None:
    """The run has not come back from it."""
    tracker, stalled = IncidentTracker(close_after=5), replace(VANISHING, rule="stalled")
    rules = ("divergence", "bad_head", "stalled", "spike")
    run(tracker, range(1), DIVERGENCE, rules=rules)
    run(tracker, range(1, 60), replace(VANISHING, rule=cause), stalled, rules=rules)
    run(tracker, range(60, 120), stalled, rules=rules)
    run(tracker, range(120, 121), stalled, SPIKE, rules=rules)
    assert len(tracker.alerts) == incidents


def test_a_spike_that_returns_while_its_cause_is_there_is_its_effect() -> None:
    tracker, rules = IncidentTracker(close_after=5, effects_within=50), ("divergence", "spike")
    run(tracker, range(1), DIVERGENCE, rules=rules)
    run(tracker, range(1, 3), DIVERGENCE, SPIKE, rules=rules)
    run(tracker, range(3, 10), DIVERGENCE, rules=rules)
    assert [alert.rule for alert in tracker.open_faults] == ["divergence"]
    assert not run(tracker, range(10, 11), DIVERGENCE, SPIKE, rules=rules)
    (alert,) = tracker.alerts
    assert [effect.rule for effect in alert.effects] == ["spike"]
    assert len(tracker.open_faults) == len(tracker.state_dict()["alerts"]) == 2, "one, however often it returns"


def test_what_is_more_than_a_notice_begins_where_it_did() -> None:
    tracker = IncidentTracker()
    run(tracker, range(3, 9), replace(VANISHING, severity=Severity.NOTICE))
    tracker.update(9, {"vanishing": [VANISHING]}, onset=lambda finding: 6)
    assert [(alert.step, alert.noticed, alert.closed_step) for alert in tracker.alerts] == [(3, 3, 9), (6, 9, None)]


def test_other_effects_that_come_back_still_follow_from_their_cause() -> None:
    tracker, rules = IncidentTracker(close_after=5, effects_within=50), ("divergence", "vanishing")
    run(tracker, range(1), DIVERGENCE, rules=rules)
    run(tracker, range(1, 3), DIVERGENCE, VANISHING, rules=rules)
    run(tracker, range(3, 60), rules=rules)
    assert not run(tracker, range(60, 61), VANISHING, rules=rules)
    assert [alert.rule for alert in tracker.alerts] == ["divergence"]


def test_an_effect_of_an_effect_belongs_to_the_first_cause() -> None:
    tracker, rules = IncidentTracker(), ("divergence", "exploding", "vanishing")
    first, second = replace(NONFINITE, rule="divergence"), replace(NONFINITE, rule="exploding")
    run(tracker, range(1), first, rules=rules)
    run(tracker, range(1, 2), first, second, rules=rules)
    run(tracker, range(2, 3), first, second, VANISHING, rules=rules)
    (alert,) = tracker.alerts
    assert alert.rule == "divergence"
    assert [effect.rule for effect in alert.effects] == ["exploding", "vanishing"]
    lasting = IncidentTracker(close_after=5, effects_within=50)
    run(lasting, range(1), first, rules=rules)
    run(lasting, range(1, 100), second, rules=rules)
    assert not run(lasting, range(100, 101), second, VANISHING, rules=rules), "its cause is open, if the first is not"


def test_what_a_finding_says_follows_from_it_is_an_effect() -> None:
    tracker = IncidentTracker()
    run(tracker, range(1), replace(VANISHING, effects=(Effect("starved", ("a",)),)))
    run(tracker, range(1, 2), replace(VANISHING, effects=(Effect("starved", ("a", "b")),)))
    assert tracker.alerts[0].effects == (Effect("starved", ("a", "b")),)


def test_an_onset_lies_behind_the_end_of_the_incident_before() -> None:
    tracker = IncidentTracker(close_after=2, reopen_within=10)
    run(tracker, range(5), VANISHING)
    run(tracker, range(5, 30))
    tracker.update(30, {"vanishing": [VANISHING]}, onset=lambda finding: 0)
    assert [(alert.step, alert.noticed) for alert in tracker.alerts] == [(0, 0), (5, 30)]


def test_the_onset_of_a_fault_in_other_layers_is_its_own() -> None:
    tracker, other = IncidentTracker(close_after=2), replace(VANISHING, layer="z", sites=("z",))
    tracker.update(3, {"vanishing": [VANISHING]}, onset=lambda finding: 1)
    run(tracker, range(4, 30))
    tracker.update(30, {"vanishing": [other]}, onset=lambda finding: 2)
    run(tracker, range(31, 40))
    tracker.update(40, {"vanishing": [replace(other, layer="y", sites=("y",))]}, onset=lambda finding: 2)
    assert [(alert.layer, alert.step) for alert in tracker.alerts] == [(VANISHING.layer, 1), ("z", 2)]
    late = IncidentTracker(close_after=2)
    late.update(3, {"vanishing": [VANISHING]}, onset=lambda finding: 2)
    run(late, range(4, 30))
    late.update(30, {"vanishing": [other]}, onset=lambda finding: 2)
    assert [alert.step for alert in late.alerts] == [2, 3], "rule and step tell incidents apart"


def test_the_onset_is_that_of_the_first_finding() -> None:
    tracker = IncidentTracker()
    other = replace(VANISHING, layer="fc3")
    tracker.update(9, {"vanishing": [VANISHING, other]}, onset=lambda finding: 3 if finding is VANISHING else 4)
    assert tracker.alerts[0].step == 3


def test_its_state_survives_json_and_goes_on_as_if_uninterrupted() -> None:
    through, resumed = IncidentTracker(), IncidentTracker()
    for tracker in (through, resumed):
        run(tracker, range(3), VANISHING)
        run(tracker, range(3, 18))
    state = json.loads(json.dumps(resumed.state_dict()))
    resumed = IncidentTracker()
    resumed.load_state_dict(state)
    assert resumed.alerts == through.alerts
    for tracker in (through, resumed):
        run(tracker, range(18, 40))
        run(tracker, range(100, 102), VANISHING)
    assert resumed.alerts == through.alerts
    assert resumed.alerts[0].times == 2


def test_its_state_is_plain_whatever_rules_give() -> None:
    odd = replace(
        VANISHING,
        rule=np.str_("vanishing"),
        layer=np.str_("fc0"),
        sites=(np.str_("fc0"),),
        value=np.float64(6),  # type: ignore[arg-type]
        threshold=3,
    )
    tracker = IncidentTracker()
    tracker.update(np.int64(3), {odd.rule: [odd]})  # type: ignore[arg-type]
    assert plain(tracker.state_dict())


def plain(thing: object) -> bool:
    """Whether all of it is of Python's own types, not of classes derived from them."""
    if type(thing) is dict:
        return all(plain(key) and plain(value) for key, value in thing.items())
    if type(thing) in (list, tuple):
        return all(map(plain, thing))  # type: ignore[call-overload]
    return thing is None or type(thing) in (str, int, float, bool)


def test_an_incident_that_no_rule_would_close_is_over_when_its_state_is_loaded() -> None:
    tracker = IncidentTracker()
    run(tracker, range(5), NONFINITE, VANISHING, rules=("nonfinite", "vanishing"))
    resumed = IncidentTracker()
    resumed.load_state_dict(tracker.state_dict(), rules=["vanishing", "spike"])
    assert [(alert.rule, alert.closed_step) for alert in resumed.alerts] == [("nonfinite", None)], "its effect is open"
    run(resumed, range(5, 30))
    assert [(alert.rule, alert.closed_step) for alert in resumed.alerts] == [("nonfinite", 4)]
    run(resumed, range(30, 31), VANISHING)
    assert [alert.rule for alert in resumed.open_faults] == ["vanishing"]


@pytest.mark.parametrize(
    "change",
    [
        {"open": {"vanishing": 1}},
        {"open": {"vanishing": -1}},
        {"open": {"spike": 0}},
        {"open": {"spike": 0}, "clean": {"spike": 0}},
        {"open": {"vanishing": "x"}},
        {"open": None},
        {"clean": {}},
        {"alerts": [{"rule": "vanishing"}]},
        {"alerts": [{"severity": "terrible"}]},
        {"alerts": 3},
        {"causes": [[0, 7]]},
        {"causes": [[0, 0]]},
    ],
)
def test_a_damaged_state_changes_nothing(change: dict[str, object]) -> None:
    tracker = IncidentTracker()
    run(tracker, range(5), VANISHING)
    before = tracker.alerts
    with pytest.raises((LookupError, TypeError, ValueError, AttributeError)):
        tracker.load_state_dict({**tracker.state_dict(), **change})
    assert tracker.alerts == tracker.open_faults == before


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ([], ""),
        (["a"], "a"),
        (["a", "b", "c", "d"], "a, b, c, d"),
        (["a", "b", "c", "d", "e"], "a, b ... e (5 in all)"),
    ],
)
def test_listing_keeps_both_ends_of_a_long_list(names: list[str], text: str) -> None:
    assert short_list(names) == text


ALERT = Alert("vanishing", Severity.WARNING, "fc0", ("fc0", "fc1"), 7, 7, 6.0, 3.5, "It fades.", "nn.ReLU.")


def test_the_text_of_an_alert() -> None:
    assert str(ALERT) == "vanishing in fc0, fc1 since step 7: It fades. Try: nn.ReLU."
    late = replace(ALERT, noticed=19, effects=(Effect("dead", ("fc1",), "fc1", 9, 12), Effect("spike", ())))
    assert str(late) == (
        "vanishing in fc0, fc1 since step 7 (noticed at 19): It fades. What follows: dead in fc1 since step 9; spike. "
        "Try: nn.ReLU."
    )
    assert str(replace(ALERT, closed_step=7)) == "vanishing in fc0, fc1 at step 7: It fades. Try: nn.ReLU."
    assert str(replace(ALERT, sites=(), layer="total")) == (
        "vanishing in the whole model since step 7: It fades. Try: nn.ReLU."
    )


def test_the_worst_come_first_and_then_the_earliest() -> None:
    error = replace(ALERT, rule="nonfinite", severity=Severity.ERROR, step=9)
    early = replace(ALERT, rule="spike", step=2)
    assert ranked([ALERT, early, error]) == (error, early, ALERT)


VERDICT = """\
GradWatch: 2 incidents in 4 layers over 100 steps, overhead 1.2 %
1. error: nonfinite in fc2
   since step 50 (still open)
   NaN.
   Try: less lr.
2. warning: vanishing in fc0, fc1
   since step 7 (over after step 30, came back 2 times)
   It fades.
   Try: nn.ReLU.
   notice: spike in fc0
   since step 51 (over after step 51)
   It jumped.
   Try: clip.
Not trained, frozen: backbone.weight, backbone.bias
Not trained, unused: head.weight
Note: the sink Table failed"""


def test_the_text_of_a_verdict() -> None:
    verdict = Verdict(
        incidents=(
            Alert("nonfinite", Severity.ERROR, "fc2", ("fc2",), 50, 50, 1.0, 0.0, "NaN.", "less lr."),
            replace(ALERT, closed_step=30, times=3),
            Alert("spike", Severity.NOTICE, "fc0", ("fc0",), 51, 51, 2.0, 1.0, "It jumped.", "clip.", 51),
        ),
        steps=100,
        layers=4,
        overhead=0.0123,
        untrained={"backbone.weight": "frozen", "backbone.bias": "frozen", "head.weight": "unused"},
        notes=("the sink Table failed",),
    )
    assert str(verdict) == VERDICT
    assert not verdict.healthy


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (None, "GradWatch: healthy. 2 layers over 400 steps"),
        ((231.0, 40.0), "GradWatch: healthy. 2 layers over 400 steps, loss 231 -> 40, overhead 0.0 %"),
        ((231.0, 230.6), "GradWatch: nothing found in 400 steps; loss 231 -> 231: it has not moved. 2 layers"),
        ((3.0, 1.5e24), "nothing found in 400 steps; loss 3 -> 1.5e24: it is higher than at the start. 2 layers"),
        ((-5.0, -9.0), "GradWatch: healthy. 2 layers over 400 steps, loss -5 -> -9,"),
        ((0.0, 0.0), "loss 0 -> 0: it has not moved"),
        ((0.693, 0.688), "loss 0.693 -> 0.688: it has hardly moved"),
        ((0.693, 0.7), "loss 0.693 -> 0.7: it has hardly moved"),
    ],
)
def test_a_run_is_healthy_where_its_loss_fell(loss: tuple[float, float] | None, words: str) -> None:
    assert words in str(Verdict((), 400, 2, 0.0, {}, loss=loss))


def test_a_run_is_not_healthy_where_gradwatch_failed_before_its_end() -> None:
    verdict = Verdict((), 5, 2, 0.0, {}, loss=(231.0, 40.0), failed=True)
    assert str(verdict).startswith("GradWatch: nothing found before it failed. 2 layers over 5 steps, loss 231 -> 40, ")
    assert str(replace(verdict, loss=(2.0, 2.0))).startswith("GradWatch: nothing found before it failed. 2 layers over")
    assert str(replace(verdict, incidents=(ALERT,))).startswith(
        "GradWatch: 1 incident in 2 layers over 5 steps, before it failed, "
    )


def test_a_number_and_its_percent_stay_in_a_line() -> None:
    line = "GradWatch: healthy. 3 layers over 120 steps, overhead 19.6 %"
    assert wrapped(line, len(line) - 1) == [line.removesuffix(" 19.6 %"), "19.6 %"]


def test_notices_leave_a_run_healthy() -> None:
    notice = replace(ALERT, severity=Severity.NOTICE)
    verdict = Verdict(incidents=(notice,), steps=10, layers=2, overhead=0.0, untrained={})
    assert verdict.healthy
    assert str(verdict).startswith("GradWatch: healthy. 2 layers over 10 steps, overhead 0.0 %\n   notice: vanishing")


def test_what_has_grown_is_reported() -> None:
    """A sink that shows an incident is notified when layers join it and when it comes back, not while it goes on."""
    tracker = IncidentTracker(close_after=1)
    first, more = VANISHING, replace(VANISHING, sites=(*VANISHING.sites, "another"))
    assert tracker.update(0, {"vanishing": [first]}).grown == ()
    assert tracker.update(1, {"vanishing": [first]}).grown == ()
    (grown,) = tracker.update(2, {"vanishing": [more]}).grown
    assert grown.sites == more.sites
    tracker.update(3, {"vanishing": []})
    (back,) = tracker.update(4, {"vanishing": [first]}).grown
    assert (back.closed_step, back.times) == (None, 2)


def test_a_verdict_is_wrapped_at_the_terminals_width(monkeypatch: pytest.MonkeyPatch) -> None:
    message = " ".join(f"evidence{number}" for number in range(30))
    effects = tuple(Effect(rule, ("fc0", "fc1")) for rule in ("dead", "spike", "collapse", "vanishing", "saturation"))
    alert = replace(ALERT, message=message, effects=effects, incident_file="/" + "x" * 90)
    verdict = Verdict((alert,), 100, 4, 0.1, {})
    assert str(verdict) == "\n".join(verdict.lines)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "70")
    lines = str(verdict).splitlines()
    assert all(len(line) <= 70 for line in lines if "/xxx" not in line)
    assert " ".join(lines).split() == " ".join(verdict.lines).split(), "nothing is lost"
    assert all(line.startswith("   ") for line in lines[2:])
