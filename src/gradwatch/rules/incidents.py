"""Incidents: opened at a rule's first finding, grown by later ones, closed once the fault is gone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, KeysView, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from gradwatch.core.alert import CLOSE_AFTER, CONSEQUENCES, Alert, Effect, Finding, Severity, alert_to_dict
from gradwatch.core.typed_values import typed

OVER_AT_ONCE = ("nonfinite", "spike")
"""Rules whose fault has no place that it stays in: the next one, in another layer, belongs to the same incident."""

CLEAN_EVALUATIONS = 5
"""Evaluations in a row without a finding that close an incident at least: where a rule judges samples, they may be far
apart. Judgement."""

MOST_APART = 2
"""Incidents of a rule from which on one that returns soon, in other layers, is none of its own. Judgement."""

SPIKE_EFFECTS_WITHIN = 10
"""Steps after a spike within which its effects begin. As `OVERFLOW_RECORDS`."""

PRECEDENCE = {rule: place for place, rule in enumerate(CONSEQUENCES)}
"""Rule -> its place among causes that began together."""


@dataclass(frozen=True, slots=True)
class IncidentChanges:
    """The incidents that changed at one step."""

    opened: tuple[Alert, ...] = ()
    closed: tuple[Alert, ...] = ()
    """Incidents that are over, and, as notices, those that turned out to follow from another one."""
    grown: tuple[Alert, ...] = ()
    """Incidents that more layers or effects joined, that got worse, or that were reopened."""
    worse: tuple[Alert, ...] = ()
    """Those of `grown` whose severity rose."""

    def __bool__(self) -> bool:
        return bool(self.opened or self.closed or self.grown)


class IncidentTracker:
    """Keeps the incidents of a run: at most one open incident per rule.

    Layers in which a fault is found later join the open incident. A fault that returns within `reopen_within` steps of
    the incident's end, in one of its layers, reopens it; one that wanders, in any layer. A fault that follows from
    another one, which is open or recent, is no incident of its own but an effect of that one, even if its own rule
    found it first, where it began later. The incident is as severe as the worst of its effects.
    """

    def __init__(self, *, close_after: int = CLOSE_AFTER, reopen_within: int = 200, effects_within: int = 50) -> None:
        self.close_after = close_after
        """Steps without a finding that close an incident, if its rule has been evaluated often enough. Judgement."""
        self.reopen_within = reopen_within
        """Steps after its end during which a fault that returns reopens its incident. Judgement."""
        self.effects_within = effects_within
        """Steps after the last finding of a cause during which its consequences are effects, even if the cause is
        closed: dead units are found some tens of steps after the step that made them so. Of a spike, which is over
        at once, the effects have to begin within `SPIKE_EFFECTS_WITHIN`. Judgement."""
        self._faults: list[Alert] = []
        """Incidents and effects, in the order in which they were found; an effect is a notice."""
        self._cause: dict[int, int] = {}  # index in `_faults` of an effect -> of its incident
        self._open: dict[str, int] = {}  # rule -> index in `_faults`
        self._clean_evaluations: dict[str, int] = {}
        self._last_seen: dict[str, int] = {}

    @property
    def alerts(self) -> tuple[Alert, ...]:
        """All incidents so far, in the order in which they were found, in their present state."""
        return tuple(self._incidents().values())

    @property
    def open_faults(self) -> tuple[Alert, ...]:
        """The faults that are open; an effect is a notice."""
        return tuple(self._faults[place] for place in self._open.values())

    @property
    def open_rules(self) -> KeysView[str]:
        """The rules whose faults are open; the view follows as they open and close."""
        return self._open.keys()

    def update(
        self,
        step: int,
        findings: Mapping[str, Sequence[Finding] | None],
        order: Mapping[str, int] = MappingProxyType({}),
        *,
        onset: Callable[[Finding], int] | None = None,
    ) -> IncidentChanges:
        """Open, grow and close incidents by the findings of each rule at `step`; None where a rule could not tell.

        `order`: site -> its place in the model; an incident names its layers in that order. `onset`: the step at which
        the fault of a finding begins, `step` by default.
        """
        findings = {rule: found and self._heard(rule, found) for rule, found in findings.items()}
        over = self._over(step, findings)
        if not over and not any(findings.values()):
            return IncidentChanges()
        before = self._incidents()
        for rule in over:
            self._close(self._open.pop(rule), self._last_seen[rule])
        for rule, found in findings.items():
            if found:
                if not self._grow(rule, step, found, order):
                    self._open_fault(rule, step, found, step if onset is None else onset(found[0]))
                self._clean_evaluations[rule], self._last_seen[rule] = 0, step
        return self._changes(before)

    def _over(self, step: int, findings: Mapping[str, Sequence[Finding] | None]) -> list[str]:
        """Rules whose open faults are over, as too many evaluations up to this one of `findings` found nothing."""
        clean = [rule for rule, found in findings.items() if found is not None and not found and rule in self._open]
        for rule in clean:
            self._clean_evaluations[rule] += 1
        enough = min(CLEAN_EVALUATIONS, self.close_after)
        return [
            rule
            for rule in clean
            if self._clean_evaluations[rule] >= enough and step - self._last_seen[rule] >= self.close_after
        ]

    def _changes(self, before: Mapping[int, Alert]) -> IncidentChanges:
        """How the incidents differ from those `before`, as `_incidents` gave them."""
        after = self._incidents()
        opened = [alert for place, alert in after.items() if place not in before]
        changed = [(before[place], alert) for place, alert in after.items() if alert != before.get(place, alert)]
        absorbed = [self._faults[place] for place in before if place in self._cause]
        closed = [alert for _, alert in changed if alert.closed_step is not None]
        grown = [(known, alert) for known, alert in changed if alert.closed_step is None]
        worse = [alert for known, alert in grown if alert.severity.order > known.severity.order]
        return IncidentChanges(
            tuple(opened), tuple(absorbed + closed), tuple(alert for _, alert in grown), tuple(worse)
        )

    def add_files(self, alert: Alert, *, incident_file: str, checkpoint: str) -> Alert:
        """Note in the incident of `alert` the files that were saved for it; returns it."""
        place = next(i for i, known in enumerate(self._faults) if known.key == alert.key)
        self._faults[place] = replace(self._faults[place], incident_file=incident_file, checkpoint=checkpoint)
        return self._incidents()[place]

    def state_dict(self) -> dict[str, object]:
        """Numbers and text of Python's own types: numpy's would make a checkpoint unloadable."""
        return {
            "alerts": [alert_to_dict(alert) for alert in self._faults],
            "causes": [[effect, cause] for effect, cause in self._cause.items()],
            "open": {str(rule): place for rule, place in self._open.items()},
            "clean": {str(rule): times for rule, times in self._clean_evaluations.items()},
            "last_seen": {str(rule): int(step) for rule, step in self._last_seen.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any], *, rules: Iterable[str] | None = None) -> None:
        """Continue from a state. Open incidents stay open, except those of rules that are not among `rules` any more.

        Raises LookupError, TypeError, ValueError or AttributeError for a state that `state_dict` did not make.
        """
        alerts = typed([Alert], state["alerts"], "alerts")
        causes = {int(effect): int(cause) for effect, cause in state["causes"]}
        opened, clean, last_seen = (typed({str: int}, state[key], key) for key in ("open", "clean", "last_seen"))
        if not all(0 <= cause < len(alerts) and cause not in causes for cause in causes.values()):
            raise ValueError("the cause of an effect is not among its incidents")
        for rule, place in opened.items():
            if alerts[place].rule != rule or alerts[place].closed_step is not None or rule not in clean:
                raise ValueError(f"its open incident of {rule} is not among its alerts")
        for rule in opened.keys() - set(opened if rules is None else rules):
            place = opened.pop(rule)
            alerts[place] = replace(alerts[place], closed_step=last_seen[rule])
        self._faults, self._cause = alerts, causes
        self._open, self._clean_evaluations, self._last_seen = opened, clean, last_seen

    def _grow(self, rule: str, step: int, found: Sequence[Finding], order: Mapping[str, int]) -> bool:
        """Add the findings to the rule's incident that is open or recent; False if there is none."""
        place = self._open.get(rule)
        if place is None:
            place = self._reopened(rule, step, found)
        elif self._is_worse(found[0], place) and not self._may_follow(rule, place):
            self._close(place, step)
            return False
        if place is None:
            return False
        self._faults[place] = _joined(self._faults[place], found[0], _sites(found), order)
        if (cause := self._cause.get(place)) is not None:
            self._faults[cause] = _worsened(self._faults[cause], found[0].severity)
        return True

    def _close(self, place: int, step: int) -> None:
        """The fault at `place` was last seen at `step`."""
        self._faults[place] = replace(self._faults[place], closed_step=step)

    def _reopened(self, rule: str, step: int, found: Sequence[Finding]) -> int | None:
        """Reopen the rule's incident, closed lately, that goes on: one of a layer of these findings, as its words are
        of its layers; or the last, where it is over at once or the fault wanders from layer to layer. Its index; None
        where there is none.
        """
        own = [place for place, fault in enumerate(self._faults) if fault.rule == rule]
        recent = [place for place in own if step - (self._faults[place].closed_step or 0) <= self.reopen_within]
        alike = [place for place in recent if not _apart(_sites(found), self._faults[place].sites)]
        if rule in OVER_AT_ONCE or len(own) >= MOST_APART:
            alike = alike or recent
        if not alike:
            return None
        place = alike[-1]
        if (cause := self._cause.get(place)) is not None:
            # a spike is over at once, and the next one needs its cause to be there
            over = rule == "spike" and self._faults[cause].closed_step is not None
            if found[0].independent or over:
                return None
        if self._is_worse(found[0], place) or not self._belong(found, place):
            return None
        before = self._faults[place]
        self._faults[place] = replace(before, closed_step=None, times=before.times + 1)
        self._open[rule] = place
        return place

    def _heard(self, rule: str, found: Sequence[Finding]) -> Sequence[Finding]:
        """Those of the findings of a rule that count: a notice does not beside a warning or an error, and is no part of
        an open one in other layers.
        """
        serious = [finding for finding in found if finding.severity is not Severity.NOTICE]
        place = self._open.get(rule)
        return serious or (found if place is None or self._belong(found, place) else ())

    def _belong(self, found: Sequence[Finding], place: int) -> bool:
        """Whether the findings are about the fault at `place`, not notices about other layers than those of a warning
        or an error.
        """
        fault, sites = self._faults[place], _sites(found)
        other = sites != fault.sites and set(sites).isdisjoint(fault.sites)
        return not (other and found[0].severity is Severity.NOTICE and fault.severity is not Severity.NOTICE)

    def _is_worse(self, finding: Finding, place: int) -> bool:
        """Whether the fault at `place` is a notice, and no effect of another, and the `finding` is not: then it is an
        incident of its own, or its words would not be read. So is a gradient that harms the weights after one that did
        not.
        """
        fault = self._faults[place]
        notice = fault.severity is Severity.NOTICE and finding.severity is not Severity.NOTICE
        harms = _is_harmless(fault) and finding.severity is Severity.ERROR
        return place not in self._cause and (notice or harms)

    def _may_follow(self, rule: str, place: int) -> bool:
        """Whether what is worse now may come of the gradient at `place`: a step that was not skipped has lost the
        weights.
        """
        fault = self._faults[place]  # of a loss alone no gradient comes
        return _is_harmless(fault) and bool(fault.sites) and not self._clean_evaluations[rule]

    def _open_fault(self, rule: str, step: int, found: Sequence[Finding], onset: int) -> None:
        """Open an incident, or an effect where its cause is open or recent. `onset`: its step."""
        first, new = found[0], len(self._faults)
        messages = dict.fromkeys(finding.message for finding in found)  # of layers with another cause each
        remedies = dict.fromkeys(finding.remedy.rstrip(".") for finding in found)
        self._faults.append(
            Alert(
                rule,
                first.severity,
                first.layer,
                _sites(found),
                self._free_onset(rule, step, found, onset),
                step,
                first.value,
                first.threshold,
                " ".join(messages),
                first.remedy if len(remedies) == 1 else f"{'; '.join(remedies)}.",
                effects=first.effects,
                headline=first.headline * (len(messages) == 1),
            )
        )
        self._open[rule] = new
        cause = None if first.independent else self._recent_cause(new)
        if cause is not None:
            self._absorb(new, cause)
            return
        if first.severity is Severity.NOTICE:
            return  # it explains no fault
        for place in range(new):
            recent = step - self._faults[place].noticed <= self.effects_within
            if recent and place not in self._cause and self._caused(new, place):
                self._absorb(place, new)

    def _free_onset(self, rule: str, step: int, found: Sequence[Finding], onset: int) -> int:
        """`onset`, or a later step: an earlier incident of these layers has the steps up to its end, and every one of
        the rule has the step at which it begins, as rule and step are its name.
        """
        ends = [
            fault.step if self._is_worse(found[0], place) else fault.closed_step
            for place, fault in enumerate(self._faults)
            if fault.rule == rule and fault.closed_step is not None and not _apart(_sites(found), fault.sites)
        ]
        onset = min(step, max([onset, *(end + 1 for end in ends)]))
        while any(fault.rule == rule and fault.step == onset for fault in self._faults):
            onset += 1
        return onset

    def _recent_cause(self, new: int) -> int | None:
        """The index of the incident that the fault at `new`, just found, follows from; None where there is none."""
        fault = self._faults[new]
        for place in reversed(range(new)):
            known = self._faults[place]
            recent = known.closed_step is None or fault.noticed - known.closed_step <= self.effects_within
            if known.closed_step is not None:
                recent |= known.step <= fault.step <= known.closed_step  # begun then, and found later
            if (known.rule, fault.rule) == ("divergence", "spike"):
                effects = [self._faults[effect] for effect, of in self._cause.items() if of == place]
                recent |= any(effect.closed_step is None for effect in effects)  # the run has not come back from it
            if known.rule == "spike":
                seen = self._last_seen["spike"] if known.closed_step is None else known.closed_step
                recent &= fault.step - seen <= SPIKE_EFFECTS_WITHIN
            serious = place in self._cause or known.severity is not Severity.NOTICE
            # layers that a library never gives a gradient get no signal either
            serious |= known.rule == "disconnected" and set(fault.sites) <= set(known.sites)
            if recent and serious and self._caused(place, new):
                return self._cause.get(place, place)
        return None

    def _caused(self, place: int, other: int) -> bool:
        """Whether the fault at `place` may be the cause of the `other`, by their rules and onsets.

        Where only one of the two rules can be the cause it need not have begun first if it was found first: a rule may
        need some steps to be certain.
        """
        cause, effect = self._faults[place], self._faults[other]
        if effect.rule not in CONSEQUENCES.get(cause.rule, ()) or _is_harmless(cause):
            return False
        if cause.rule in CONSEQUENCES.get(effect.rule, ()):
            return (cause.step, PRECEDENCE[cause.rule]) < (effect.step, PRECEDENCE[effect.rule])
        return place < other or cause.step <= effect.step

    def _absorb(self, place: int, cause: int) -> None:
        """The fault at `place` turns out to follow from that at `cause`, and so do its effects."""
        self._faults[cause] = _worsened(self._faults[cause], self._faults[place].severity)
        self._faults[place] = replace(self._faults[place], severity=Severity.NOTICE)
        self._cause |= {effect: cause for effect, of in self._cause.items() if of == place}
        self._cause[place] = cause

    def _incidents(self) -> dict[int, Alert]:
        """Index in `_faults` -> incident, with what follows from it as its effects: it is open while one of them is."""
        found = {place: fault for place, fault in enumerate(self._faults) if place not in self._cause}
        for effect, cause in self._cause.items():
            fault = self._faults[effect]
            more = Effect(fault.rule, fault.sites, fault.layer, fault.step, fault.noticed), *fault.effects
            ends = found[cause].closed_step, fault.closed_step
            end = None if None in ends else max(step for step in ends if step is not None)
            found[cause] = replace(found[cause], effects=_merged((*found[cause].effects, *more), {}), closed_step=end)
        return found


def _is_harmless(fault: Alert) -> bool:
    """Whether it is a gradient or a loss that is not finite and reaches no weights, as far as is known: an intervention
    skips the step, or the gradients are finite.
    """
    return fault.rule == "nonfinite" and fault.severity is Severity.WARNING


def _apart(sites: Sequence[str], others: Sequence[str]) -> bool:
    """Whether two faults are in layers of which none is the same; that of the whole model is in all."""
    return bool(sites and others) and set(sites).isdisjoint(others)


def _sites(found: Sequence[Finding]) -> tuple[str, ...]:
    """The sites of all findings, each once."""
    return tuple(dict.fromkeys(site for finding in found for site in finding.sites))


def _joined(alert: Alert, finding: Finding, sites: Sequence[str], order: Mapping[str, int]) -> Alert:
    """`alert` with the new sites and effects, and as severe as `finding` if that is worse."""
    effects = _merged((*alert.effects, *finding.effects), order)
    named = alert.sites if set(sites) <= set(alert.sites) else _in_order((*alert.sites, *sites), order)
    return _worsened(replace(alert, sites=named, effects=effects), finding.severity)


def _worsened(alert: Alert, severity: Severity) -> Alert:
    """`alert` with that severity if it is worse; a notice stays one."""
    worse = severity.order > alert.severity.order and alert.severity is not Severity.NOTICE
    return replace(alert, severity=severity) if worse else alert


def _merged(effects: Iterable[Effect], order: Mapping[str, int]) -> tuple[Effect, ...]:
    """Effects of one rule as one, which begins with the first of them."""
    found: dict[str, Effect] = {}
    for effect in effects:
        known = found.get(effect.rule)
        if known is None:
            found[effect.rule] = replace(effect, sites=_in_order(effect.sites, order))
            continue
        first = effect if known.step is None or (effect.step is not None and effect.step < known.step) else known
        found[effect.rule] = replace(first, sites=_in_order((*known.sites, *effect.sites), order))
    return tuple(found.values())


def _in_order(sites: Iterable[str], order: Mapping[str, int]) -> tuple[str, ...]:
    """`sites`, each once, in the model's order where it is known."""
    return tuple(sorted(dict.fromkeys(sites), key=lambda site: order.get(site, len(order))))
