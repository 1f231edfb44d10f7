"""Stop: ends the training when a rule reports a fault that the user chose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gradwatch.core.alert import Alert, Severity
from gradwatch.core.arguments import check_choice, check_whole, shown
from gradwatch.interventions.contract import Action, ByPatterns, InterventionSettings, ParameterScope, StopCondition


class Stop(ByPatterns):
    """`Stop("nonfinite", "divergence")`: the training ends after the batch at which one of these incidents opens.

    The training ends as with EarlyStopping: checkpoints are written, all ranks end together, the verdict is printed. In
    a plain loop `watch.should_stop` is True. With `GradWatch(on_alert="stop")` any warning ends the training; `Stop`
    chooses which.
    """

    def __init__(
        self,
        *rules: str,
        severity: str | None = None,
        after: int = 0,
        layers: str | Sequence[str] | None = None,
        dry_run: bool = False,
    ) -> None:
        """Raises TypeError or ValueError for a wrong argument. The watch raises ValueError for a name that none of its
        rules has.

        Args:
            rules: Names of the rules whose incidents count; none for all of them.
            severity: The least severity that counts: "notice", "warning" or "error". None: "error" without `rules`,
                else "warning". An effect of another incident counts as a notice.
            after: Number of steps that the incident must last. It ends when its fault is not found for 20 steps. An
                incident that is open in the checkpoint from which a run resumes goes on with the steps counted there;
                with 0 it does not end the training, because the user has chosen to resume.
            layers: Which layers' incidents count, as in `GradWatch`.
            dry_run: Log once what would have ended the training, and go on.
        """
        for rule in rules:
            if not isinstance(rule, str) or not rule:
                raise TypeError(f"rules: {shown(rule)}: expected names of rules such as 'nonfinite'")
        check_choice("severity", severity, (*Severity, None))
        self.severity = Severity(severity or ("warning" if rules else "error"))
        self.after = check_whole("after", after, "a number of steps of at least 0 such as 50", least=0)
        self.settings = InterventionSettings(layers, dry_run=dry_run, ends=True, rules=rules)

    def begin(self, scope: ParameterScope) -> Action:
        everywhere, layers = self.settings.layers is None, frozenset(scope.layers)
        rules = self.settings.rules
        starts = _IncidentStarts()

        def reason(incidents: Sequence[Alert], step: int) -> str | None:
            since = starts.since
            counted = [
                alert
                for alert in incidents
                if (not rules or alert.rule in rules)
                and alert.severity.order >= self.severity.order
                and (everywhere or not layers.isdisjoint((alert.layer, *alert.sites)))
            ]
            for closed in since.keys() - {alert.rule for alert in counted}:
                del since[closed]
            for alert in counted:
                lasted = step - since.setdefault(alert.rule, step)
                if lasted >= self.after:
                    return f"{alert.rule} in {alert.where} {alert.since}"
            return None

        return StopCondition(reason, counts_resumed=self.after > 0, memory=starts)

    def __str__(self) -> str:
        what = ", ".join(self.settings.rules) or f"any {self.severity}"
        return f"Stop at {what}" + f" that lasts {self.after} steps" * bool(self.after)


class _IncidentStarts:
    """When each open incident began, saved in checkpoints."""

    def __init__(self) -> None:
        self.since: dict[str, int] = {}
        """Rule -> the step at which its incident was first reported."""

    def state_dict(self) -> dict[str, Any]:
        return {"since": dict(self.since)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.since = {str(rule): int(step) for rule, step in state["since"].items()}
