"""Scale and Zero: multiply gradients by a number that does not depend on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from gradwatch.core.arguments import check_function, check_number, check_whole
from gradwatch.interventions.contract import Action, At, ByPatterns, InterventionSettings, On, ParameterScope, Scaling

Schedule = Callable[[int], float]
"""Number of steps that the optimizer has begun before -> factor. Every rank calls it, and all must get the same."""


EXPECTED_FACTOR = "a finite number such as 0.1, or a function of the step"


class Scale(ByPatterns):
    """`Scale(0.1, layers="backbone.*")`: gradients are multiplied by 0.1. g <- f g.

    With plain SGD that is a smaller learning rate. Adam divides the factor out again: it affects only clipping, and
    the update through Adam's epsilon.
    """

    def __init__(
        self,
        factor: float | Schedule,
        *,
        layers: str | Sequence[str] | None = None,
        at: At = "auto",
        on: On = "gradient",
        dry_run: bool = False,
    ) -> None:
        """`factor`: a finite number, or a function of the optimizer's steps so far that returns one; a negative factor
        reverses gradients. The other arguments as in `Clip`. Raises TypeError or ValueError for a wrong argument.
        """
        self.settings = InterventionSettings(layers, at, on, dry_run)
        if callable(factor):
            check_function("factor", factor, EXPECTED_FACTOR)
        self.factor = factor if callable(factor) else check_number("factor", factor, EXPECTED_FACTOR)

    def begin(self, scope: ParameterScope) -> Action:
        def factors(norms: Tensor, present: Tensor, step: int) -> float:
            if not callable(self.factor):
                return self.factor
            return check_number(f"factor({step})", self.factor(step), "a finite number such as 0.1")

        return Scaling(factors, range(len(scope.names)), constant=True)

    def __str__(self) -> str:
        return "Scale by a schedule" if callable(self.factor) else f"Scale by {self.factor:g}"


class Zero(ByPatterns):
    """`Zero(layers="backbone.*", until=500)`: gradients are exactly 0, NaN and infinite ones too.

    Unlike freezing, this leaves the graph the same, and weight decay and momentum continue.
    """

    def __init__(
        self,
        *,
        layers: str | Sequence[str] | None = None,
        until: int | None = None,
        at: At = "auto",
        on: On = "gradient",
        dry_run: bool = False,
    ) -> None:
        """`until`: number of optimizer steps for which it acts, None for all. The other arguments as in `Clip`.

        Raises TypeError or ValueError for a wrong argument.
        """
        self.settings = InterventionSettings(layers, at, on, dry_run)
        expected = "a number of optimizer steps of at least 1, or None for all"
        self.until = None if until is None else check_whole("until", until, expected)

    def begin(self, scope: ParameterScope) -> Action:
        def factors(norms: Tensor, present: Tensor, step: int) -> float:
            return 0.0 if self.until is None or step < self.until else 1.0

        return Scaling(factors, range(len(scope.names)), constant=True)

    def __str__(self) -> str:
        return "Zero" if self.until is None else f"Zero for {self.until} steps"
