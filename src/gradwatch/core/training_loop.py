"""How a run trains, and what that makes of its numbers: the labels of trust."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TrainingMode:
    """What the probe has to know of the training loop."""

    accumulate: int = 1
    """Micro-batches per optimizer step (N)."""
    ranks: int = 1
    """Processes that average their gradients (W)."""
    rank: int = 0
    """Which of them this is."""
    scaled: bool = False
    """Whether a loss scale is in the gradients during backward."""
    clipping: str = ""
    """The clipping that comes after the measurement, in words; empty if none is known of."""
    monitored: bool = False
    """Whether somebody goes by our numbers as the training runs: a stopper, a scheduler."""
    automatic: bool = False
    """Whether the loop says of every backward pass to which step it belongs."""

    @property
    def here(self) -> str:
        """' on rank 1', where there are several."""
        return f" on rank {self.rank}" if self.ranks > 1 else ""

    @property
    def direct(self) -> bool:
        """Whether what a hook sees can be the optimizer's gradient: one micro-batch, one rank, no loss scale."""
        return self.accumulate == 1 and self.ranks == 1 and not self.scaled

    def label(self, *, sharded: bool = False, acting: bool = False) -> str:
        """What a gradient norm of this run is, for people. `acting`: interventions come after it."""
        later = ["interventions"] * acting + [f"clipping ({self.clipping})"] * bool(self.clipping)
        parts = [
            f"accumulated x{self.accumulate}" if self.accumulate > 1 else "",
            "unscaled" if self.scaled else "",
            f"mean over {self.ranks} ranks" if self.ranks > 1 else "",
            "summed over shards" if sharded else "",
            f"before {' and '.join(later)}" if later else "as the optimizer receives them",
        ]
        return ", ".join(part for part in parts if part)
