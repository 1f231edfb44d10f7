"""A case: one training, what is wrong with it if anything, which layers are to blame, and from which step on."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import torch

import lightning as L

FAULTS = (
    "nonfinite",
    "vanishing",
    "exploding",
    "divergence",
    "spike",
    "dead",
    "saturation",
    "disconnected",
    "frozen",
    "stalled",
    "underflow",
    "input_scale",
    "bad_head",
    "stale_grad",
    "act_blowup",
    "collapse",
    "tampered",
)
"""The rule names of the contract, and so the classes of the unhealthy cases."""

HEALTHY = "healthy"


@dataclass(frozen=True, slots=True)
class Fit:
    """One training, ready to run. Everything random about it has been drawn under the case's seed."""

    module: L.LightningModule
    batches: Sequence[Any]
    """One entry per micro-batch, in order, each used once."""
    yardstick: Callable[[], float]
    """How badly the model does its task as it stands, above 0 and lower is better; NaN where it cannot."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the Trainer."""


@dataclass(frozen=True, slots=True)
class Case:
    """A training by name. `fault` is a rule name, or "healthy"."""

    name: str
    fault: str
    family: str
    """The module that holds it."""
    what: str
    """What is wrong and why it harms; of a healthy one, what is unusual about it."""
    make: Callable[[bool], Fit]
    faulty_layers: frozenset[str] = frozenset()
    """Layers of which any is a right answer; empty if the fault is in no single layer."""
    onset: int = 0
    """The first optimizer step at which the fault is there."""
    quick: bool = False
    """Whether it is one of the few that the tests run."""

    @property
    def unhealthy(self) -> bool:
        return self.fault != HEALTHY

    def build(self, seed: int, *, fixed: bool = False) -> Fit:
        """The training under `seed`, or its version without the fault: same data, same seed."""
        L.seed_everything(seed, verbose=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self.make(fixed)


CASES: dict[str, Case] = {}
"""Every case by name; the families fill it when they are imported."""


def unhealthy(
    fault: str, *faulty_layers: str, onset: int = 0, quick: bool = False
) -> Callable[[Callable[[bool], Fit]], Callable[[bool], Fit]]:
    """Registers a function `make(fixed)` as an unhealthy case; its docstring says what is wrong and why it harms."""
    if fault not in FAULTS:
        raise ValueError(f"{fault!r} is no fault; there is {', '.join(FAULTS)}")
    return _register(fault, frozenset(faulty_layers), onset, quick)


def healthy(*, quick: bool = False) -> Callable[[Callable[[], Fit]], Callable[[], Fit]]:
    """Registers a function `make()` as a healthy case; its docstring says what may look odd about it."""

    def register(make: Callable[[], Fit]) -> Callable[[], Fit]:
        def without_fix(fixed: bool) -> Fit:
            return make()

        without_fix.__name__, without_fix.__doc__, without_fix.__module__ = (
            make.__name__,
            make.__doc__,
            make.__module__,
        )
        _register(HEALTHY, frozenset(), 0, quick)(without_fix)
        return make

    return register


def _register(
    fault: str, faulty_layers: frozenset[str], onset: int, quick: bool
) -> Callable[[Callable[[bool], Fit]], Callable[[bool], Fit]]:
    def register(make: Callable[[bool], Fit]) -> Callable[[bool], Fit]:
        name = make.__name__
        if name in CASES:
            raise ValueError(f"two cases are called {name!r}")
        if not make.__doc__:
            raise ValueError(f"{name}: a case says in its docstring what it is")
        family = make.__module__.rpartition(".")[2]
        CASES[name] = Case(name, fault, family, make.__doc__.strip(), make, faulty_layers, onset, quick)
        return make

    return register


def halves() -> dict[str, str]:
    """Case name -> "tuned" or "held_out": within each class every second one in the order of its name's SHA-256.

    Decided by names alone, before anything was tuned. A new case may move others of its class, so a case that joins
    after constants were tuned is a reason to say so beside the score.
    """
    found = {}
    for fault in (*FAULTS, HEALTHY):
        names = sorted((case.name for case in CASES.values() if case.fault == fault), key=_digest)
        found |= {name: ("tuned", "held_out")[place % 2] for place, name in enumerate(names)}
    return found


def _digest(name: str) -> str:
    return sha256(name.encode()).hexdigest()


def trainer(fit: Fit, callbacks: Sequence[L.Callback]) -> L.Trainer:
    """The Trainer of `fit`: silent, on the CPU, one pass over its batches."""
    options: dict[str, Any] = {
        "accelerator": "cpu",
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        **fit.options,
    }
    return L.Trainer(callbacks=[*callbacks], **options)


def run(fit: Fit, callbacks: Sequence[L.Callback] = ()) -> L.Trainer:
    """Train `fit` to its end under `callbacks`; torch's and Lightning's remarks on tiny trainings are left out."""
    loader = torch.utils.data.DataLoader(_Given(fit.batches), batch_size=None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = trainer(fit, callbacks)
        made.fit(fit.module, loader)
    return made


class _Given(torch.utils.data.Dataset[Any]):
    """Batches as they were drawn."""

    def __init__(self, batches: Sequence[Any]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, place: int) -> Any:
        return self.batches[place]
