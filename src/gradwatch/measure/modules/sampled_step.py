"""What is taken on sampled steps only: signals and forward statistics of modules, and the norms of micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import Tensor, nn

from gradwatch.core.record import Layout
from gradwatch.hooks.hook_set import Account
from gradwatch.measure.device_buffer import HostCopy
from gradwatch.measure.layers import Layer
from gradwatch.measure.modules import ModuleStatistic
from gradwatch.measure.modules.data_flow import DataFlow
from gradwatch.measure.modules.double_softmax import DoubleSoftmax
from gradwatch.measure.modules.expected_gradients import ExpectedGradients
from gradwatch.measure.modules.fp16_zeros import Fp16Zeros
from gradwatch.measure.modules.loss_head import LossHead
from gradwatch.measure.modules.module_hooks import SignalReading, Signals
from gradwatch.measure.modules.outputs_hooks import Outputs
from gradwatch.measure.modules.recurrent import ThroughTime
from gradwatch.measure.modules.signal_norms import SignalNorms
from gradwatch.measure.noise_scale import MicroNorms


class Samples:
    """Owns the hooks that are there for a sampled step, and takes them off when it has been read."""

    def __init__(
        self, signals: Literal["auto", "safe", "full", "off"], activations: Literal["auto"] | bool = "auto"
    ) -> None:
        """`activations`: whether forward statistics are taken; "auto": with the signals."""
        self._full = signals == "full"
        self._account = Account()
        self._head = LossHead()
        forward = signals != "off" if activations == "auto" else bool(activations)
        gauges: list[ModuleStatistic] = [Outputs()] if forward else []
        self._inlets = [ThroughTime()] if signals != "off" else []
        if signals != "off":
            gauges += [SignalNorms(), Fp16Zeros(), self._head, *self._inlets]
            gauges += [DoubleSoftmax(self._account), ExpectedGradients(self._account)]
        self._flow = DataFlow()
        if gauges:
            gauges.append(self._flow)
        self._signals = Signals(gauges, self._inlets, self._account)
        self._micro = MicroNorms()

    @property
    def errors(self) -> list[Exception]:
        """What went wrong inside hooks."""
        late = [error for inlet in self._inlets for error in inlet.errors]
        return self._account.errors + late + ([self._micro.error] if self._micro.error else [])

    def tap(self, layers: Sequence[Layer], layout: Layout) -> None:
        """Hook the modules until `untap` or `collect`; twice does nothing."""
        if self._signals.gauges:
            self._signals.arm(layers, layout, full=self._full)

    def untap(self) -> None:
        self._signals.disarm()

    def begin_at(self, loss: Tensor) -> None:
        """A backward pass begins at `loss`, whose graph is there."""
        self._signals.begin_at(loss)

    def end_at(self, loss: Tensor | None) -> None:
        """A step's loss, after its backward pass: for loops that do not tell when one begins."""
        if loss is not None and self._head in self._signals.gauges:
            self._head.on_loss(loss)

    def weigh(self, parameters: Sequence[nn.Parameter]) -> None:
        """Take the norms of every micro-batch's gradient until `collect`; twice does nothing."""
        self._micro.arm(parameters)

    def collect(
        self, layout: Layout, scale: Tensor | None
    ) -> tuple[SignalReading | None, tuple[int, ...], HostCopy | None]:
        """What flowed through the modules, the order in which the layers ran, and the sum `micro` of the squared norms
        of micro-batches.

        `scale`: the loss scale that was in those, 0-d.
        """
        self.disarm()
        self._account.collected()
        squares = self._micro.take()
        if squares is not None and scale is not None:
            squares = squares / scale.to(squares.device, non_blocking=True).double().square()
        micro = None if squares is None else HostCopy({"micro": squares})
        return self._signals.collect(layout), self._signals.order(), micro

    @property
    def edges(self) -> tuple[tuple[int, int], ...] | None:
        """Between which layers data flows, as `Layout.edges`, as far as it has been collected."""
        return self._flow.edges

    @property
    def seconds(self) -> float:
        """Time spent in the hooks for what was last collected."""
        return self._account.seconds + self._micro.seconds + sum(inlet.seconds for inlet in self._inlets)

    @property
    def arming(self) -> float:
        """Time that it took to put the modules' hooks there for what was last collected."""
        return self._signals.arming

    def disarm(self) -> None:
        self._signals.disarm()
        self._micro.disarm()
