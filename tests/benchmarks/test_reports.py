"""Public reports rebuilt: what is said of them, how it is graded, and that GradWatch names a part of them rightly."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.reports.catalogue import REPORTS
from benchmarks.reports.page import BEGIN, END, summary, text
from benchmarks.reports.report import Report
from benchmarks.reports.trial import Grade, Outcome, Run, Said, grade, train
from benchmarks.zoo.case import Fit
from benchmarks.zoo.page import DOCS

from gradwatch.rules import default_rules

RULES = {rule.name for rule in default_rules()}

QUICK = ("layers_in_a_list", "labels_of_another_shape", "adapters_with_a_head_left_frozen", "images_rounded_to_zero")
"""Those that are trained here: what is found by no other test. `python -m benchmarks.reports` trains all."""


def test_each_report_has_an_address_a_cause_and_a_fix() -> None:
    assert len(REPORTS) >= 30
    addresses = [report.address for report in REPORTS.values()]
    assert len(set(addresses)) == len(addresses)
    for report in REPORTS.values():
        assert report.address.startswith("https://github.com/"), report.name
        assert report.cause.endswith("."), report.name
        assert report.fix, report.name
        assert set(report.says) <= RULES, report.name


def _report(*says: str, layers: tuple[str, ...] = (), words: str = "") -> Report:
    def make(fixed: bool) -> Fit:
        raise NotImplementedError

    return Report("a", "https://github.com/a/b/issues/1", "A cause.", "a fix", says, layers, words, make)


def _said(rule: str, *, loud: bool = True, layer: str = "net.head", words: str = "") -> Said:
    return Said(rule, loud, 3, (layer,), words)


def test_grades() -> None:
    wanted = _report("dead", layers=("net.head",), words="bias")
    assert grade(wanted, []) is Grade.MISSED
    assert grade(wanted, [_said("spike", loud=False)]) is Grade.MISSED
    assert grade(wanted, [_said("spike")]) is Grade.PARTLY
    assert grade(wanted, [_said("dead", loud=False, words="bias")]) is Grade.PARTLY
    assert grade(wanted, [_said("dead")]) is Grade.PARTLY
    assert grade(wanted, [_said("dead", layer="net.header", words="bias")]) is Grade.PARTLY
    assert grade(wanted, [_said("dead", layer="net.head.0", words="its Bias")]) is Grade.RIGHTLY
    assert grade(_report("dead"), [_said("spike"), _said("dead", layer="total")]) is Grade.RIGHTLY


def test_the_page_counts_what_was_graded() -> None:
    report, silent = _report("dead"), Run(1.0, 0.1, (), ())
    outcomes = [
        Outcome(report, 0, Run(1.0, 0.9, (_said("dead"),), ()), silent),
        Outcome(report, 0, Run(1.0, 0.9, (), ()), Run(1.0, 0.1, (_said("spike"),), ())),
    ]
    assert summary(outcomes) == (
        "2 trainings: 1 named rightly, 0 named partly, 1 missed; 1 of 2 fixed ones without an alert"
    )
    assert "| [a/b 1](https://github.com/a/b/issues/1) | A cause. | a fix | `dead` at 3 | rightly | nothing |" in text(
        outcomes
    )
    assert not Outcome(report, 0, Run(1.0, 0.1, (), ()), silent).learns


def test_the_docs_have_a_place_for_it() -> None:
    page = DOCS.read_text(encoding="utf-8")
    assert page.index(BEGIN) < page.index(END)


@pytest.mark.parametrize("name", QUICK)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
def test_the_fixed_training_raises_no_alert(name: str) -> None:
    assert train(REPORTS[name], 0, fixed=True).loud == ()


@pytest.mark.parametrize("name", QUICK)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
def test_the_broken_training_is_named_rightly(name: str) -> None:
    assert grade(REPORTS[name], train(REPORTS[name], 0, fixed=False).said) is Grade.RIGHTLY
