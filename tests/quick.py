"""The quick run: named samples of the catalogues, few examples of each property.

`make test` runs what is not marked `slow`, with the hypothesis profile "quick". `make test-slow` runs what is marked
slow. `make test-all` runs everything at once, and every property test with the profile "full".
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable
from typing import Any

import pytest

with warnings.catch_warnings():
    # in a process of ranks nothing has imported it before, and plugins of other packages warn while it is imported
    warnings.simplefilter("ignore")
    from hypothesis import settings

MODES = (
    "plain",
    "accumulation x4, the last window of 2",
    "clipping by norm",
    "16-mixed with a GradScaler",
    "16-mixed, fused optimizer",
    "checkpointing, non-reentrant",
    "manual optimization, two optimizers, toggled",
    "parameters replaced in mid-run",
)
ARCHITECTURES = ("wide_mlp", "torch_transformer", "lstm", "in_place_resnet", "sparse_embedding", "shared_and_tied")
NETWORKS = ("resnet", "densenet")
"""Of the networks of torchvision's families."""
USAGES = (
    "boring_model",
    "transformer",
    "checkpoints",
    "resumed",
    "early_stopping",
    "stochastic_weight_averaging",
    "exponential_moving_average",
    "backbone_finetuning",
    "lbfgs",
    "logs_for_tensorboard",
    "clipped by norm",
    "accumulated",
)
ZOO = ("sigmoid_stack", "missing_value_in_a_batch", "plain_mlp", "scaler_backs_off")
"""Two cases with a fault, two healthy ones."""
EXAMPLES = ("bad_head", "tampered", "divergence")
HIGHER_ORDER = (
    "functional_gradient",
    "mapped",
    "jacobian_of_inputs",
    "dual_numbers_at_times",
    "gradient_penalty",
    "backward_that_makes_a_graph",
    "two_backward_passes",
    "checkpointed_reentrant",
    "compiled",
)
"""Trainings that use torch.func, forward-mode AD, gradients of gradients."""
ORIGINS = ("log of 0", "root of 0")
EVENTS = ("setup", "on_train_batch_start", "on_before_optimizer_step", "on_exception")
"""Events of a callback at which a training fails."""
PLACES = ("training_step", "backward", "optimizer.step")
"""Places inside a training where it fails."""

SAMPLES = {
    "modes": MODES,
    "architectures": ARCHITECTURES,
    "networks": NETWORKS,
    "usages": USAGES,
    "zoo": ZOO,
    "examples": EXAMPLES,
    "higher order": HIGHER_ORDER,
    "origins": ORIGINS,
    "events": EVENTS,
    "places": PLACES,
}

FEW = 10
"""Examples of a property in the quick run."""

settings.register_profile("quick", max_examples=FEW, deadline=None)
settings.register_profile("full", deadline=None)
settings.load_profile("full")


def cases(catalogue: Iterable[Any], sample: Collection[Any]) -> list[Any]:
    """Every name or value of `catalogue`, as parameters of a test; those that are not in `sample` are slow."""
    return [pytest.param(case, marks=() if case in sample else pytest.mark.slow, id=str(case)) for case in catalogue]


def examples(count: int) -> settings:
    """`count` examples of a property, or few with the profile "quick"."""
    return settings(max_examples=min(count, FEW) if settings.get_current_profile_name() == "quick" else count)
