"""Findings, alerts and the verdict: what rules report about a run."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from numbers import Integral
from textwrap import wrap
from typing import Any

from gradwatch.core.arguments import MOST, check_choice, check_items, check_number, check_whole, wrong
from gradwatch.core.guard import UserFacingError
from gradwatch.core.loss_levels import loss_text, stuck_text
from gradwatch.core.record import TOTAL

CLOSE_AFTER = 20
"""Measured steps without a finding after which an incident is over. Judgement."""

MAX_NAMES = 4
"""Names that a line lists in full; of a longer list it has three names and the count. Judgement."""

CONSEQUENCES: Mapping[str, frozenset[str]] = {
    cause: frozenset(effects.split())
    for cause, effects in {
        "stale_grad": "nonfinite divergence act_blowup collapse saturation dead stalled exploding vanishing spike",
        "underflow": "dead disconnected frozen stalled vanishing",
        "tampered": "nonfinite divergence act_blowup collapse saturation dead stalled exploding vanishing spike",
        "bad_head": "saturation dead stalled vanishing",
        "input_scale": "nonfinite divergence act_blowup saturation dead disconnected stalled exploding vanishing spike",
        "spike": "nonfinite divergence act_blowup saturation dead stalled exploding vanishing",
        "exploding": "nonfinite divergence act_blowup saturation dead vanishing spike",
        "divergence": "nonfinite act_blowup collapse saturation dead disconnected stalled exploding vanishing spike",
        "act_blowup": "nonfinite divergence saturation dead exploding vanishing spike",
        "nonfinite": "divergence act_blowup saturation dead disconnected stalled exploding vanishing spike",
        "collapse": "saturation dead disconnected stalled vanishing",
        "saturation": "stalled vanishing",
        "dead": "disconnected stalled vanishing",
        "disconnected": "vanishing",
        "vanishing": "dead stalled",
    }.items()
}
"""Rule -> the rules whose faults may follow from its fault. Where each of two may follow from the other, the one that
began first is the cause; of two that began together, the one that stands first here. Judgement.
"""


class Severity(str, Enum):
    """How bad a fault is.

    `ERROR`: the run is lost, or soon will be. `WARNING`: the model learns worse than it should. `NOTICE`: worth a
    line in the verdict; it is logged at DEBUG, and `on_alert` does not get it.
    """

    NOTICE = "notice"
    WARNING = "warning"
    ERROR = "error"

    def __str__(self) -> str:
        return self.value

    @property
    def order(self) -> int:
        """0 for a notice, 1 for a warning, 2 for an error."""
        return ("notice", "warning", "error").index(self.value)


@dataclass(frozen=True, slots=True)
class Effect:
    """A fault that follows from another one."""

    rule: str
    """Name of the rule that found it."""
    sites: tuple[str, ...]
    """Names of the layers that it is in, in model order; empty where it is the whole model's."""
    layer: str = ""
    """Name of the layer where it began; empty where that is not known."""
    step: int | None = None
    """Its onset; None where the finding of its cause says that it follows."""
    noticed: int | None = None
    """The step at which it was found; None likewise."""

    def __str__(self) -> str:
        where = f" in {sites_text(self.sites)}" if self.sites else ""
        return f"{self.rule}{where}" + ("" if self.step is None else f" since step {self.step}")


@dataclass(frozen=True, slots=True)
class Finding:
    """What a rule finds at one step.

    A rule returns a new finding at each record at which it sees the fault; GradWatch joins them into one `Alert`.
    Raises TypeError or ValueError for a field that is not as below; a severity may be its text, such as "warning".
    """

    rule: str
    """Name of the rule, such as "vanishing"."""
    severity: Severity
    layer: str
    """Name of the layer to look at first; "total" for the whole model or the loss."""
    sites: tuple[str, ...]
    """Names of all layers with the fault, in model order; empty where it is the whole model's."""
    value: float
    """The measured number, in the rule's unit; the rule's page in docs/alerts explains it."""
    threshold: float
    """The limit that `value` has passed, in the same unit."""
    message: str
    """Evidence and likely cause, in full sentences."""
    remedy: str
    """One concrete change to try."""
    onset: int = 1
    """The record at which the fault begins, counted from the end of the history: 1 is the latest."""
    headline: str = ""
    """What happened, in a clause for one line of the log: "the learning rate jumped 3000 times, to 3"."""
    effects: tuple[Effect, ...] = ()
    """What follows from it along the data flow: layers behind the origin that get no gradient, for example."""
    independent: bool = False
    """Whether it is known not to follow from another fault: a NaN that came with the batch, for example."""

    def __post_init__(self) -> None:
        for name in ("rule", "layer", "message", "remedy", "headline"):
            if not isinstance(getattr(self, name), str):
                raise TypeError(wrong(name, getattr(self, name), "text"))
        for name in ("value", "threshold"):
            check_number(name, getattr(self, name), "a number", valid=lambda number: True)
        check_whole("onset", self.onset, "a number of records of at least 1")
        severity = Severity(check_choice("severity", self.severity, tuple(Severity)))
        object.__setattr__(self, "severity", severity)
        for name, kind, expected in (("sites", str, "names of layers"), ("effects", Effect, "objects `Effect`")):
            items = check_items(name, getattr(self, name), f"a tuple of {expected}", kind=kind, most=MOST)
            object.__setattr__(self, name, items)


@dataclass(frozen=True, slots=True)
class Alert:
    """An incident: one fault, from the step at which it begins to the step at which it was last seen.

    Steps are counted as `Record.step` counts them: optimizer steps taken before this one, from 0.
    """

    rule: str
    """Name of the rule that found it, such as "vanishing"."""
    severity: Severity
    """The highest severity of its findings and of its effects."""
    layer: str
    """Name of the layer where it began, to look at first; "total" for the whole model or the loss."""
    sites: tuple[str, ...]
    """Names of all layers with the fault, in model order; empty where it is the whole model's."""
    step: int
    """The onset: the first step at which the record shows the fault."""
    noticed: int
    """The step at which it was found: `step`, or later where a rule needs several steps to be certain."""
    value: float
    """The number measured at `noticed`, in the rule's unit; the rule's page in docs/alerts explains it."""
    threshold: float
    """The limit that `value` has passed, in the same unit."""
    message: str
    """Evidence and likely cause, in full sentences."""
    remedy: str
    """One concrete change to try."""
    closed_step: int | None = None
    """The last step at which the fault was seen; None while the incident is open."""
    effects: tuple[Effect, ...] = ()
    """What follows from it: other faults, or other layers. They are not incidents of their own."""
    headline: str = ""
    """What happened, in a clause; empty where the rule gives none."""
    times: int = 1
    """How often the fault occurred in this incident: 1, and 1 more for each time that it returned."""
    incident_file: str = ""
    """Path of the file that the flight recorder wrote; empty if there is none."""
    checkpoint: str = ""
    """Path of the last checkpoint from before the fault; empty if there is none."""

    @property
    def key(self) -> tuple[str, int]:
        """Which incident of a run it is: the rule and the onset, which stay the same as it grows and closes."""
        return self.rule, self.step

    @property
    def saved_files(self) -> tuple[str, ...]:
        """The files saved for this incident, each as 'what it is: path'."""
        places = {"Incident file": self.incident_file, "Last healthy checkpoint": self.checkpoint}
        return tuple(f"{what}: {path}" for what, path in places.items() if path)

    def __str__(self) -> str:
        follows = f" What follows: {'; '.join(map(str, self.effects))}." if self.effects else ""
        saved = "; ".join(self.saved_files)
        return f"{self.rule} in {self.where} {self.since}: {self.message}{follows} Try: {self.remedy} {saved}".rstrip()

    @property
    def where(self) -> str:
        """The layers, for a sentence."""
        return sites_text(self.sites) or whole_model(self.layer)

    @property
    def since(self) -> str:
        """When it began: 'at step 61', 'since step 120 (noticed at 139)'."""
        noticed = f" (noticed at {self.noticed})" if self.noticed != self.step else ""
        return f"{'at' if self.closed_step == self.step else 'since'} step {self.step}{noticed}"


class AlertRaised(UserFacingError, RuntimeError):  # noqa: N818 (the user asked for it)
    """Ends the training at an alert, with `on_alert="raise"`; `alert` is that alert."""

    def __init__(self, alert: Alert) -> None:
        super().__init__(str(alert))
        self.alert = alert


def short_list(names: Sequence[str]) -> str:
    """Names for a sentence; a long list is abbreviated: 'a, b ... z (17 in all)'."""
    if len(names) <= MAX_NAMES:
        return ", ".join(names)
    return f"{names[0]}, {names[1]} ... {names[-1]} ({len(names)} in all)"


def name_text(names: Sequence[str], kind: str = "layer") -> str:
    """Names with what they are, because a name may be a bare number: 'layer 0', 'layers 0, 2'."""
    return f"{kind}{'s' * (len(names) > 1)} {short_list(names)}"


def sites_text(names: Sequence[str]) -> str:
    """`name_text` of layers where a name is a bare number, and `short_list` where none is."""
    return name_text(names) if any(map(str.isdecimal, names)) else short_list(names)


def whole_model(layer: str) -> str:
    """`layer`, or what it stands for where it is the total."""
    return "the whole model" if layer == TOTAL else layer


def alert_to_dict(alert: Alert) -> dict[str, object]:
    """The fields of `alert` as numbers, strings and lists, which JSON can hold."""
    fields: dict[str, object] = _plain(asdict(alert))
    return fields | {"value": float(alert.value), "threshold": float(alert.threshold)}


def _plain(value: Any) -> Any:
    """`value` of Python's own types, which numpy's scalars and enums extend."""
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, str) else int(value) if isinstance(value, Integral) else value


@dataclass(frozen=True, slots=True, repr=False)
class Verdict:
    """The ranked summary of a run. `str(verdict)` is the text that the terminal shows, `repr` too, for notebooks."""

    incidents: tuple[Alert, ...]
    """All incidents: by severity, then by step."""
    steps: int
    """Number of measured optimizer steps."""
    layers: int
    """Number of watched layers."""
    overhead: float
    """Share of the training time that GradWatch took, 0 to 1."""
    untrained: Mapping[str, str]
    """Parameters that never got a gradient, by name, and the reason."""
    notes: tuple[str, ...] = ()
    """What GradWatch could not do: rules and sinks that failed, modes that it cannot measure."""
    interventions: tuple[str, ...] = ()
    """One sentence for each intervention about what it did."""
    loss: tuple[float, float] | None = None
    """The level of the loss at first and at last, medians of ten, or the first loss where one of those ten is far above
    all; None where unknown, or too early to tell."""
    ended: bool = True
    """False of a recorded run that was cut off, or is still under way."""
    run_steps: int | None = None
    """Number of optimizer steps of the run, where some were not measured; None where all were, or it is not known."""
    failed: bool = False
    """Whether GradWatch failed and watched no more before the run ended; one of `notes` says why."""

    @property
    def healthy(self) -> bool:
        """Whether the run had neither a warning nor an error."""
        return not serious(self.incidents)

    def __str__(self) -> str:
        """The whole text; printed on a terminal, it is wrapped at its width."""
        if not (sys.stdout and sys.stdout.isatty()):
            return "\n".join(self.lines)
        width = shutil.get_terminal_size().columns
        return "\n".join(piece for line in self.lines for piece in wrapped(line, width))

    __repr__ = __str__

    @property
    def lines(self) -> tuple[str, ...]:
        """The lines of the whole text, however long."""
        return tuple(self._lines(self.incidents))

    @property
    def brief(self) -> str:
        """`str(verdict)` without the incidents."""
        return "\n".join(self._lines(()))

    @property
    def untrained_by_reason(self) -> dict[str, list[str]]:
        """Reason -> the parameters that never got a gradient for it."""
        found: dict[str, list[str]] = {}
        for name, reason in self.untrained.items():
            found.setdefault(reason, []).append(name)
        return found

    @property
    def stuck(self) -> str:
        """What the loss did, where it did not fall; empty where it fell or is not known."""
        return stuck_text(self.loss) if self.loss is not None else ""

    def _clean_line(self, what: str) -> str:
        """The first line of a run without a warning: healthy only where it was watched to its end, and the loss is not
        known not to have fallen.
        """
        words = {
            "unmeasured": "no step was measured.",
            "no end": f"nothing found so far. {what}",
            "gradwatch failed": f"nothing found before it failed. {what}",
            "stuck": f"nothing found in {self.steps} {step_word(self)}s; {self.stuck}. {what}",
            "healthy": f"healthy. {what}",
        }
        return f"GradWatch: {words[health_of(self) if self.steps else 'unmeasured']}"

    def _lines(self, incidents: Iterable[Alert]) -> list[str]:
        steps = self.steps if self.run_steps is None else self.run_steps
        watched = f"{self.layers} layer{'s' * (self.layers != 1)} over {steps} step{'s' * (steps != 1)}"
        watched += f", {self.steps} of them measured" * (self.run_steps is not None)
        if self.healthy and self.loss is not None and not self.stuck:
            watched += f", {loss_text(self.loss)}"
        count = len(serious(self.incidents))
        watched += ", before it failed" * (self.failed and count > 0)
        what = f"{watched}, overhead {100 * self.overhead:.1f} %"
        lines = [f"GradWatch: {count} incident{'s' * (count > 1)} in {what}"] if count else [self._clean_line(what)]
        numbers = iter(range(1, count + 1))
        for alert in incidents:
            lines += _incident_lines(alert, f"{next(numbers)}. " if alert.severity is not Severity.NOTICE else "   ")
        lines += [f"Not trained, {reason}: {short_list(names)}" for reason, names in self.untrained_by_reason.items()]
        lines += [f"Intervention: {effect}" for effect in self.interventions]
        return lines + [f"Note: {note}" for note in self.notes]


def _incident_lines(alert: Alert, number: str) -> list[str]:
    end = "still open" if alert.closed_step is None else f"over after step {alert.closed_step}"
    found = f"noticed at {alert.noticed}, " if alert.noticed != alert.step else ""
    return [
        f"{number}{alert.severity}: {alert.rule} in {alert.where}",
        f"   since step {alert.step} ({found}{end}{returns_text(alert.times)})",
        f"   {alert.message}",
        *([f"   What follows: {'; '.join(map(str, alert.effects))}."] if alert.effects else ()),
        f"   Try: {alert.remedy}",
        *(f"   {saved}" for saved in alert.saved_files),
    ]


def returns_text(times: int) -> str:
    """', came back 2 times', of `Alert.times`; empty where the fault did not return."""
    return f", came back {times - 1} time{'s' * (times > 2)}" if times > 1 else ""


def step_word(verdict: Verdict) -> str:
    """'step', or 'measured step' where others of the run were not measured."""
    return "step" if verdict.run_steps is None else "measured step"


def health_of(verdict: Verdict) -> str:
    """The worst of the severities above a notice; without one 'no end', 'unmeasured', 'gradwatch failed', 'stuck' or
    'healthy'.
    """
    if found := serious(verdict.incidents):
        return str(found[0].severity)
    if not verdict.ended:
        return "no end"
    if not verdict.steps:
        return "unmeasured"
    return "gradwatch failed" if verdict.failed else "stuck" if verdict.stuck else "healthy"


def wrapped(line: str, width: int, indent: str | None = None) -> list[str]:
    """A line of a verdict or a log in lines of `width` columns, with hanging indents. A path is not broken, so that it
    can be copied; nor is a number parted from its "%".

    `indent`: of all but the first; None for that of a verdict, as the line begins.
    """
    if indent is None:
        indent = "   " if re.match(r"\d+\. ", line) else " " * (len(line) - len(line.lstrip()))
    line = line.replace(" %", "\N{NO-BREAK SPACE}%")
    pieces = wrap(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return [piece.replace("\N{NO-BREAK SPACE}%", " %") for piece in pieces] or [""]


def ranked(alerts: Iterable[Alert]) -> tuple[Alert, ...]:
    """Sorted by severity, worst first, then by step."""
    return tuple(sorted(alerts, key=lambda alert: (-alert.severity.order, alert.step)))


def serious(alerts: Iterable[Alert]) -> list[Alert]:
    """The warnings and errors, worst first."""
    return [alert for alert in ranked(alerts) if alert.severity is not Severity.NOTICE]
