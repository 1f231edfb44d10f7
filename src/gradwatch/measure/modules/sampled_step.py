"""What is measured of modules on sampled steps: which statistics there are, and when their hooks are attached."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from gradwatch.core.layer_graph import Edge
from gradwatch.core.record import Layout
from gradwatch.hooks.garbage_collector import no_collections
from gradwatch.hooks.hook_set import HookCosts
from gradwatch.measure.layers import Layer
from gradwatch.measure.loss_pass import LossPass
from gradwatch.measure.modules import ModuleStatistic
from gradwatch.measure.modules.data_flow import DataFlow
from gradwatch.measure.modules.frozen_weights import FrozenWeights
from gradwatch.measure.modules.logit_misfit import LogitMisfit
from gradwatch.measure.modules.loss_head import LossHead
from gradwatch.measure.modules.loss_parameters import LossParameters
from gradwatch.measure.modules.module_hooks import ModuleHooks, ModuleHooksReading
from gradwatch.measure.modules.output_statistics import OutputStatistics
from gradwatch.measure.modules.recomputed_gradients import RecomputedGradients
from gradwatch.measure.modules.signal_statistics import SignalStatistics
from gradwatch.measure.modules.time_step_gradients import TimeStepGradients

FULL_HOOKS_REFUSED = (
    "signals='full': inside torch.func and in forward-mode AD, where torch's own full backward hooks raise, those of "
    "GradWatch take their place; inside torch.func no signal is measured"
)


@dataclass(frozen=True, slots=True)
class LayerFlow:
    """What sampled steps have shown of how the layers are connected; the fields are those of `Layout`."""

    order: tuple[int, ...]
    edges: tuple[Edge, ...] | None = None
    unowned: tuple[str, ...] = ()
    loss_parameters: frozenset[str] = frozenset()


class SampledStep:
    """Owns the hooks that are attached for a sampled step, and removes them when it has been read."""

    def __init__(
        self,
        signals: Literal["auto", "safe", "full", "off"],
        activations: Literal["auto"] | bool,
        loss_pass: LossPass,
        errors: list[Exception],
    ) -> None:
        """`activations`: whether forward statistics are measured; "auto": where signals are. `errors`: takes those
        inside hooks.
        """
        self._full = signals == "full"
        self.costs = HookCosts(errors=errors)
        self._head = LossHead()
        self._recomputed = RecomputedGradients(self.costs, loss_pass)
        self._signals = SignalStatistics(loss_pass)
        forward = signals != "off" if activations == "auto" else bool(activations)
        statistics: list[ModuleStatistic] = [OutputStatistics(), FrozenWeights()] if forward else []
        if signals != "off":
            statistics += [self._signals, self._head, TimeStepGradients(self.costs, loss_pass)]
            statistics += [LogitMisfit(self.costs, loss_pass), self._recomputed]
        self._data_flow = DataFlow()
        if statistics:
            statistics.append(self._data_flow)
        self._module_hooks = ModuleHooks(statistics, self.costs)
        self.pause: ExitStack | None = None
        """Within which Python's garbage collector is paused; None while it is not."""
        self._parameters = LossParameters()

    @property
    def has_module_hooks(self) -> bool:
        """Whether a sampled step has hooks on modules."""
        return len(self._module_hooks.statistics) > 0

    @property
    def has_float16_signals(self) -> bool:
        """Whether backward signals in float16 have come since the last `collect`."""
        return len(self._signals.step.nonzero) > 0

    def hook_modules(self, layers: Sequence[Layer], layout: Layout, *, whole_sample: bool, whole_batch: bool) -> None:
        """Hook the modules until `unhook_modules` or `collect`; a second call does nothing.

        `whole_sample`: as `SamplingSchedule.is_whole_sample` says: then gradients are computed a second time.
        `whole_batch`: whether that comes with the end of the batch: then reference cycles wait for it, too.
        """
        if self.has_module_hooks:
            self._recomputed.on = whole_sample
            if self.pause is None:
                self.pause = ExitStack()
                self.pause.enter_context(no_collections())
            self._module_hooks.attach(layers, layout, full=self._full)
            if not whole_batch:
                self._resume()

    def unhook_modules(self) -> None:
        """Remove all hooks; a second call does nothing."""
        self._module_hooks.hooks.remove()
        self._resume()

    def on_loss(self, loss: Tensor, model: nn.Module | None = None, *, divisor: int = 0) -> None:
        """A backward pass begins at `loss`, or has ended, in training loops that do not report where it begins.
        `model`: where the graph still exists; None where its parameters are in shards, whose leaves are others.
        `divisor`: what the loop has divided the loss by; 0 where it does not divide.
        """
        self._head.divisor = divisor
        self._module_hooks.on_loss(loss)
        if self.has_module_hooks and model is not None:
            self._parameters.look(loss, model)

    def collect(self, layout: Layout) -> ModuleHooksReading | None:
        """The statistics of the modules."""
        # the collector waits for the end of the batch: the graph may be there until then
        self._module_hooks.hooks.remove()
        return self._module_hooks.collect(layout)

    @property
    def flow(self) -> LayerFlow | None:
        """What is known since the last `collect`; None where no layer has run."""
        order = tuple(self._module_hooks.order)
        parameters = self._parameters
        return LayerFlow(order, self._data_flow.edges, parameters.unowned, parameters.owned) if order else None

    def _resume(self) -> None:
        if self.pause is not None:
            self.pause.close()
            self.pause = None
