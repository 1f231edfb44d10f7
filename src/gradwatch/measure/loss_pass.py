"""Whether the backward pass of the loss has begun, which hooks on parameters, activations and taps ask."""

from __future__ import annotations


class LossPass:
    """Distinguishes the backward pass of the loss from those that a training step runs before it, to compute the loss:
    for a gradient penalty, or an adversarial example. What flows back in these is not counted.
    """

    def __init__(self, *, announced: bool = False) -> None:
        """`announced`: whether the loop says when it begins."""
        self.announced = announced
        self.begun = True
        """Whether it has begun in this batch; where the loop does not say, it always has."""
