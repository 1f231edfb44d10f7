"""capture(): what flows through a model's modules, kept for people to look at: inputs, outputs, gradients."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gradwatch.hooks.hook_set import HookSet, in_backward
from gradwatch.toolbox.functions import called, check_function
from gradwatch.toolbox.module_calls import ModuleCalls
from gradwatch.toolbox.modules import Named, find_modules, nearest, refuse_unhookable
from gradwatch.toolbox.tensor_hooks import detached

WHAT = ("input", "output", "grad_input", "grad_output", "grad")

Entry = Any
"""Of one call: the tensor, a tuple where there are several, None in the place of a gradient that has not come."""


def capture(
    model: nn.Module,
    patterns: str | Sequence[str],
    what: str | Sequence[str] = WHAT,
    *,
    reduce: Callable[[Tensor], Any] | None = None,
    device: torch.device | str | None = None,
    limit: int | None = None,
) -> Capture:
    """What goes in and out of the modules that `patterns` name while the `with` lasts, and the gradients of it::

        with capture(model, "layer3.*") as c:
            loss_of(model(images), labels).backward()
        c["layer3.0"].output        # one entry per call of the module
        c["layer3.0"].grad_output   # dL/d(output) of the same calls
        c["layer3.0"].grad          # {parameter name: gradient}

    `patterns`: a shell pattern on module names or several, of which the later win and "!" takes away; "(root)" is the
    model itself.
    `what`: any of "input", "output", "grad_input", "grad_output", "grad".
    `reduce`: keep `reduce(tensor)` instead of each tensor, such as `torch.linalg.vector_norm`; it may not edit it.
    `device`: where to keep what is kept, such as "cpu" (which waits for the device).
    `limit`: keep the newest so many calls of each module. Without it every call is kept: give one around a training.

    What is kept is a detached copy, as it was before anybody's in-place edits. Training is what it is without it, bit
    for bit, but for sums: with "grad_output" of a module that makes an output of another (h, f(h)), the gradient of h
    may be added up in another order where it has three or more parts. Recomputing a checkpoint is no call. Under a loss
    scale (float16) gradients are scaled. Gradients of several losses at once (`is_grads_batched`) are left out.

    Raises TypeError and ValueError for arguments that will not do, and for compiled modules, of which only "grad" can
    be had.
    """
    kinds = (what,) if isinstance(what, str) else tuple(what)
    if not kinds or not set(kinds) <= set(WHAT):
        raise ValueError(f"capture: what={what!r}: expected one or several of {', '.join(WHAT)}")
    if reduce is not None:
        check_function(reduce, "capture: reduce", "torch.linalg.vector_norm")
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise ValueError(f"capture: limit={limit!r}: expected a whole number of calls from 1, or None for all")
    try:
        place = None if device is None else torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"capture: device={device!r}: expected a torch.device or its name, such as 'cpu'") from error
    found = find_modules(model, patterns, by="capture: patterns")
    if set(kinds) != {"grad"}:
        for named in found.values():
            refuse_unhookable(named, by="capture")
    return Capture(found, frozenset(kinds), _Keeper(reduce, place), limit)


class Capture(Mapping[str, "Captured"]):
    """Module name -> what was captured there. A context: hooks are on inside it, and what it has stays after it."""

    def __init__(self, found: Mapping[str, Named], what: frozenset[str], keeper: _Keeper, limit: int | None) -> None:
        self._found = found
        self._what = what
        self._keeper = keeper
        self._limit = limit
        self._hooks: HookSet | None = None
        self._clear()

    def _clear(self) -> None:
        self._grads: dict[int, Any] = {}
        self._by_module: dict[int, Captured] = {}
        for key, named in {id(named.module): named for named in self._found.values()}.items():
            named_parameters = named.module.named_parameters() if "grad" in self._what else ()
            parameters = {name: id(parameter) for name, parameter in named_parameters}
            self._by_module[key] = Captured(named.name, self._what, deque(maxlen=self._limit), parameters, self._grads)
        self._captured = {name: self._by_module[id(named.module)] for name, named in self._found.items()}

    def __enter__(self) -> Capture:
        if self._hooks is not None:
            raise RuntimeError("capture: this one is entered already; make another for a context within")
        self._clear()
        self._hooks = HookSet()
        try:
            hooked: set[int] = set()
            for named in {id(named.module): named for named in self._found.values()}.values():
                self._attach(named, self._hooks, hooked)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        hooks, self._hooks = self._hooks, None
        if hooks is not None:
            hooks.remove()

    def __getitem__(self, name: str) -> Captured:
        if name not in self._captured:
            raise KeyError(f"no module {name!r} is captured; {nearest(str(name), list(self._captured))}")
        return self._captured[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._captured)

    def __len__(self) -> int:
        return len(self._captured)

    def __repr__(self) -> str:
        return f"Capture({', '.join(f'{name}: {len(c.calls)} calls' for name, c in self.items())})"

    def _attach(self, named: Named, hooks: HookSet, hooked: set[int]) -> None:
        """`hooked`: ids of the parameters that have a hook already, for a module around this one."""
        captured, what, keeper = self._by_module[id(named.module)], self._what, self._keeper
        if what != {"grad"}:
            ports = ModuleCalls(
                lambda: _begun(captured, what, keeper),
                grad_input="grad_input" in what,
                grad_output="grad_output" in what,
                reads=True,
            )
            ports.attach(named.module, hooks)
        if "grad" in what:
            for name, parameter in named.module.named_parameters():
                if id(parameter) not in hooked:
                    hooked.add(id(parameter))
                    where = f"capture: reduce, for the gradient of {name} in module {named.name!r},"
                    hook = partial(_accumulated, id(parameter), where, self._grads, keeper)
                    hooks.on_gradient(parameter, hook, accumulated=True)


@dataclass(frozen=True, slots=True)
class Captured:
    """What was captured at one module."""

    name: str
    what: frozenset[str]
    calls: deque[CapturedCall]
    """The calls, oldest first."""
    parameters: dict[str, int]
    """Name within the module -> id of the parameter."""
    grads: dict[int, Any]
    """Id of a parameter -> what is kept of its gradient; one for all modules, whose parameters overlap."""

    @property
    def input(self) -> list[Entry]:
        """What went in, keyword arguments last: one entry per call."""
        return self._entries("input")

    @property
    def output(self) -> list[Entry]:
        """What came out: one entry per call."""
        return self._entries("output")

    @property
    def grad_input(self) -> list[Entry]:
        """dL/d(input) through this module alone, tensor for tensor as `input`: one entry per call, of its last backward
        pass.
        """
        return self._entries("grad_input")

    @property
    def grad_output(self) -> list[Entry]:
        """dL/d(output), tensor for tensor as `output`: one entry per call, of its last backward pass."""
        return self._entries("grad_output")

    @property
    def grad(self) -> dict[str, Any]:
        """Parameter name within the module -> gradient, as the last `backward()` left it in the parameter's `.grad`."""
        self._asked("grad")
        return {name: self.grads[key] for name, key in self.parameters.items() if key in self.grads}

    def _entries(self, what: str) -> list[Entry]:
        self._asked(what)
        entries = [call.kept[what] for call in self.calls]
        return [entry[0] if len(entry) == 1 else tuple(entry) for entry in entries]

    def _asked(self, what: str) -> None:
        if what not in self.what:
            raise ValueError(f"capture: {what!r} of module {self.name!r} was not asked for; add it to what={what!r}")


@dataclass(frozen=True, slots=True)
class _Keeper:
    """How a tensor is kept."""

    reduce: Callable[[Tensor], Any] | None
    device: torch.device | None

    def keep(self, tensor: Tensor, where: str) -> Any:
        # in inference mode too, kept tensors are ordinary ones
        with torch.inference_mode(False), torch.no_grad():
            apart = detached(tensor)
            if apart is None:
                return None
            if self.reduce is None:
                kept: Any = apart.to(self.device or tensor.device, copy=True)
            else:
                kept = called(self.reduce, apart, where)
                if isinstance(kept, Tensor):  # it may be a view of a tensor that is not kept
                    kept = kept.detach().to(self.device or kept.device, copy=True)
            return kept


@dataclass(slots=True, eq=False)
class CapturedCall:
    """One call of a module, and its gradients as they come: what is kept, by "input", "output", ..."""

    where: str
    keeper: _Keeper
    what: frozenset[str]
    tracked: bool = False
    """Whether gradients can come."""
    kept: dict[str, list[Any]] = field(default_factory=lambda: {what: [] for what in WHAT})

    def _keep(self, what: str, tensor: Tensor) -> Any:
        return self.keeper.keep(tensor, f"capture: reduce, for {what} of module {self.where!r},")

    def inputs(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        self.tracked = torch.is_grad_enabled()
        self.kept["grad_input"] = [None] * len(tensors)
        if "input" in self.what:
            self.kept["input"] = [self._keep("input", tensor) for tensor in tensors]
        return tensors

    def outputs(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        self.kept["grad_output"] = [None] * len(tensors)
        if "output" in self.what:
            self.kept["output"] = [self._keep("output", tensor) for tensor in tensors]
        return tensors

    def grad_output(self, number: int, gradient: Tensor) -> None:
        self.kept["grad_output"][number] = self._keep("grad_output", gradient)

    def grad_input(self, number: int, gradient: Tensor, *, more: bool) -> None:
        row = self.kept["grad_input"]
        kept = self._keep("grad_input", gradient)
        if more and row[number] is not None:
            # the parts of a sum; results of `reduce` cannot be added
            kept = row[number] + kept if self.keeper.reduce is None and kept is not None else None
        row[number] = kept


@dataclass(slots=True, eq=False)
class _Recomputed:
    """A checkpoint's segment run again, after a first run without gradients: they are those of the first."""

    call: CapturedCall

    def inputs(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        self.call.tracked = True
        return tensors

    def outputs(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return tensors

    def grad_output(self, number: int, gradient: Tensor) -> None:
        self.call.grad_output(number, gradient)

    def grad_input(self, number: int, gradient: Tensor, *, more: bool) -> None:
        self.call.grad_input(number, gradient, more=more)


def _begun(captured: Captured, what: frozenset[str], keeper: _Keeper) -> CapturedCall | _Recomputed | None:
    """The visit for a call that begins."""
    if not in_backward():
        call = CapturedCall(captured.name, keeper, what)
        captured.calls.append(call)
        return call
    # segments run again in reverse order; where gradients flow through the first run, the second does not count
    first = next((call for call in reversed(captured.calls) if not call.tracked), None)
    return None if first is None else _Recomputed(first)


def _accumulated(key: int, where: str, grads: dict[int, Any], keeper: _Keeper, parameter: nn.Parameter) -> None:
    """The hook on a parameter. It keeps no reference to it, so that the model can be freed."""
    if parameter.grad is not None:
        grads[key] = keeper.keep(parameter.grad, where)
