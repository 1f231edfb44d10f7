"""What a second run of a batch found out: where its first value that is not finite was made, and how."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Trace:
    """The origin of a value that is not finite."""

    born: Literal["forward", "backward", "batch", "weights"]
    module: str
    """The innermost module under way, by its dotted name; empty for code of the LightningModule's own."""
    site: str
    """The layer or module to look at first; empty for the loss."""
    operation: str
    """As the user wrote it, "torch.log"; empty where there is none."""
    line: str
    """Where in the user's code: "train.py:41"; empty where unknown."""
    story: str
    """What was seen, in the middle of a sentence."""
    remedy: str
    overflow: bool = False
    """Whether too large values are behind it."""
    parameters: tuple[str, ...] = ()
    """Those that were not finite before the step."""
