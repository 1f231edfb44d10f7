"""Tensors tapped with `tap()`: the norm of the gradient of each, at every measured step."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Lock
from time import perf_counter
from weakref import ref

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradwatch.core.record import MEASURED, NO_GRADIENT, TOTAL, UNMEASURABLE, Codes, Floats, Layout
from gradwatch.hooks.graph_release import MAX_UNPREPARED, made_by, release_in_a_loop
from gradwatch.hooks.hook_set import is_tracing
from gradwatch.hooks.view_gradients import register_value_hook
from gradwatch.measure.device_buffer import HostCopy, host_view
from gradwatch.measure.devices import moved
from gradwatch.measure.layers import unique_name
from gradwatch.measure.loss_pass import LossPass
from gradwatch.measure.reductions import dense_real, is_dense_real, norm_of

logger = logging.getLogger("gradwatch")

MOST = 1024
"""Names that are given a site at most: those made with a counter do not fill the memory. Judgement: ten for each of a
hundred layers."""

REMEMBERED = 65_536
"""Tensors known to be tapped already at most, in a loop that never steps its optimizer. Judgement."""

OnGradient = Callable[[Tensor | None], None]

active: tuple[ref[TensorTaps], ...] = ()
"""Those of the trainings under watch; without any, `tap` does nothing."""

_changing = Lock()


@dataclass(frozen=True, slots=True, eq=False)
class TensorTapReading:
    """The norms of one step, on their way to the host."""

    host_copy: HostCopy
    sites: NDArray[np.intp]
    """The site of each tapped tensor, shape [taps]."""
    codes: Codes
    """One `Missing` for each, shape [taps]."""
    squares: Floats
    """Sums of squared norms that the host has already, shape [taps]."""
    places: tuple[int, ...]
    """Which tap each of the copied numbers is of."""
    order: tuple[int, ...]
    """Taps in the order in which a gradient first came to them."""

    def norms(self) -> Floats:
        """Shape [taps], NaN where nothing came; waits for numbers that have not landed.

        Of several calls and backward passes in a step sqrt(sum |g|^2), and without the loss scale.
        """
        numbers, squares = self.host_copy.wait(), self.squares
        if self.places:
            squares = squares + np.bincount(self.places, weights=numbers["taps"], minlength=len(squares))
        norms = np.sqrt(squares)
        if "tap_scale" in numbers:
            norms /= numbers["tap_scale"][0]
        norms[self.codes != MEASURED] = np.nan
        return norms

    def into(self, grad_norm: Floats) -> dict[str, Floats]:
        """Put `norms` where they belong in `grad_norm`, shape [sites]; returns `tap_order`."""
        grad_norm[self.sites] = self.norms()
        order = np.full(len(grad_norm), np.nan)
        order[self.sites[list(self.order)]] = np.arange(len(self.order))
        return {"tap_order": order}

    def all_codes(self, parameters: Codes) -> Codes:
        """`parameters`, one `Missing` per site, with those of the taps put in."""
        codes = parameters.copy()
        codes[self.sites] = self.codes
        return codes


@dataclass(slots=True, eq=False)
class _TappedGradients:
    """What came in one step. On the CPU numbers are read as they come; elsewhere they stay on their device."""

    squares: dict[int, float] = field(default_factory=dict)
    sums: dict[tuple[int, torch.device], Tensor] = field(default_factory=dict)
    """0-d, by tap and device: devices have threads of their own in a backward pass, so they share nothing."""
    order: dict[int, None] = field(default_factory=dict)
    """Taps as a gradient first came to them."""
    seen: dict[tuple[int, int], tuple[ref[Tensor], int]] = field(default_factory=dict)
    """Tensors that have a hook, by tap and identity, and their versions then."""
    hooks: int = 0
    """Hooks attached in this step."""


class TensorTaps:
    """Notes tapped tensors during a training batch, and keeps only numbers of them."""

    def __init__(self, errors: list[Exception], loss_pass: LossPass) -> None:
        """`errors`: where to put what goes wrong inside a hook, or in the user's call."""
        self._loss_pass = loss_pass
        self.seconds = 0.0
        """Time spent in the hooks since this was last set to 0."""
        self._errors = errors
        self.armed = False
        """Whether the coming step is measured, and has not been yet."""
        self.in_batch = False
        """Whether a batch is under way; where the loop does not say, one always is."""
        self.used = self.has_new = False
        """Whether there are taps, and any without a site."""
        self._numbers: dict[str, int] = {}
        self._kinds: list[tuple[int, str]] = []
        self._sites: list[int] = []
        self._beyond: set[int] = set()
        self._step = _TappedGradients()
        self._warned: set[str] = set()

    def listen(self) -> None:
        """From now on `tap` calls `watch`; twice does nothing."""
        global active
        with _changing:
            active = (*(one for one in active if one() not in (None, self)), ref(self))

    def close(self) -> None:
        """Nothing is watched any more; twice does nothing."""
        global active
        self.armed = self.in_batch = False
        with _changing:
            active = tuple(one for one in active if one() not in (None, self))

    def watch(self, tensor: Tensor, name: str) -> None:
        """`tensor`, which requires a gradient, was tapped: hook it if its gradient can be measured."""
        if not (self.armed and self.in_batch):
            return
        begun = perf_counter()
        try:
            if (on_gradient := self._gradient_callback(tensor, name)) is not None:
                self._step.hooks += 1
                if self._step.hooks > MAX_UNPREPARED:
                    release_in_a_loop(*made_by([tensor]))
                register_value_hook(tensor, on_gradient)
        except Exception as error:  # raised here, it would end the user's forward pass
            self._errors.append(error)
        self.seconds += perf_counter() - begun

    def placed(self, layout: Layout) -> tuple[Layout, tuple[str, ...]]:
        """`layout` with a site for every tap, and the names of those that are new.

        A tap with the name of a layer, parameter or activation is numbered. One that a checkpoint knew gets the site
        that it had.
        """
        self.has_new = False
        names = list(self._numbers)[len(self._sites) :]
        for name in names:
            others = {site.name for i, site in enumerate(layout.sites) if site.kind != "tap" or i in self._sites}
            chosen = unique_name(name, {TOTAL, *others})
            if chosen != name:
                self._warn_once(
                    f"taken {name}",
                    "tap(..., %r): that is also the name of a %s; the tapped tensor is %r",
                    name,
                    layout.sites[layout.index[name]].kind,
                    chosen,
                )
            if chosen not in layout.index:
                layout = layout.with_taps([(chosen, *self._kinds[self._numbers[name]])])
            self._sites.append(layout.index[chosen])
        return layout, layout.names(self._sites[len(self._sites) - len(names) :])

    def collect(self, scale: Tensor | None) -> TensorTapReading | None:
        """What came since this was last asked, on its way to the host; None where nothing was ever tapped. From now on
        nothing counts until it is `armed`: what an optimizer asks for inside its step is another gradient.

        `scale`: the loss scale that was in it, 0-d.
        """
        self.armed = False
        step, self._step = self._step, _TappedGradients()
        if not self._sites:
            return None
        codes = np.full(len(self._sites), NO_GRADIENT, dtype=np.int8)
        codes[[*step.squares, *(number for number, _ in step.sums)]] = MEASURED
        codes[list(self._beyond)] = UNMEASURABLE
        squares = np.zeros(len(self._sites))
        squares[list(step.squares)] = list(step.squares.values())
        tensors = {}
        if step.sums:
            device = next(iter(step.sums))[1]
            tensors["taps"] = torch.stack([moved(one, device) for one in step.sums.values()])
        if scale is not None:
            at = (tensors["taps"] if tensors else scale).device
            tensors["tap_scale"] = moved(scale.detach(), at).reshape(1)
        places, order = tuple(number for number, _ in step.sums), tuple(step.order)
        return TensorTapReading(HostCopy(tensors), np.array(self._sites), codes, squares, places, order)

    def _gradient_callback(self, tensor: Tensor, name: str) -> OnGradient | None:
        if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
            return None
        if tensor.is_leaf:
            # a hook would stay on it, and a parameter has a site of its own
            self._warn_once("leaf", "tap(..., %r): a leaf has its gradient in .grad; tap what is made of it", name)
            return None
        if type(tensor) is Tensor and tensor.numel() and not is_dense_real(_real(tensor)):
            return None  # a stand-in inside torch.func or a tracing
        number = self._number(name, tensor)
        if number is None:
            return None
        if type(tensor) is not Tensor:
            self._beyond.add(number)
            return None
        seen, key = self._step.seen, (number, id(tensor))
        known = seen.get(key)
        if known is not None and known[0]() is tensor and known[1] == tensor._version:
            return None  # tapped twice under one name, its gradient comes once
        if len(seen) >= REMEMBERED:
            seen.clear()
        seen[key] = ref(tensor), tensor._version

        def on_gradient(gradient: Tensor | None) -> None:
            if is_tracing() or gradient is None:
                return
            begun = perf_counter()
            try:
                self._add(number, gradient)
            except Exception as error:  # raised here, it would end the user's backward pass
                self._errors.append(error)
            self.seconds += perf_counter() - begun

        return on_gradient

    def _number(self, name: str, tensor: Tensor) -> int | None:
        with _changing:  # replicas of a model may run in threads
            number = self._numbers.get(name)
            if number is None and len(self._numbers) < MOST:
                number = self._numbers[name] = len(self._kinds)
                self._kinds.append((tensor.numel(), str(tensor.dtype).removeprefix("torch.")))
                self.used = self.has_new = True
        if number is None:
            self._warn_once("most", "tap(..., %r): %d names are tapped already, more are not watched", name, MOST)
        return number

    def _warn_once(self, once: str, text: str, *arguments: object) -> None:
        if once not in self._warned:
            self._warned.add(once)
            logger.warning(f"GradWatch: {text}", *arguments)

    def _add(self, number: int, gradient: Tensor) -> None:
        # a pass that makes a graph is to be differentiated again: a penalty on gradients
        if not (self.armed and self._loss_pass.counts()) or torch.is_grad_enabled():
            return
        values, step = dense_real(gradient), self._step
        step.order.setdefault(number)
        if values.numel() and not is_dense_real(values):
            self._beyond.add(number)
            return
        norm = norm_of(values)
        if (seen := host_view(norm)) is not None:
            step.squares[number] = step.squares.get(number, 0.0) + float(seen) ** 2
        else:
            before, key = step.sums.get((number, values.device)), (number, values.device)
            step.sums[key] = norm.square() if before is None else before.addcmul_(norm, norm)


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor
