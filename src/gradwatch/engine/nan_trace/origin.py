"""Finds the origin of a value that is not finite in a recorded run of a batch."""

from __future__ import annotations

import linecache
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradwatch.core.arguments import cut
from gradwatch.core.history import NonfiniteOrigin
from gradwatch.engine.nan_trace.backward_pass import first_nonfinite_node
from gradwatch.engine.nan_trace.call_recorder import CallRecorder, NonfiniteOutput, TorchCall
from gradwatch.engine.nan_trace.operations import Explanation, InputSummary, backward, constant, forward
from gradwatch.engine.nan_trace.values import Finiteness, finiteness_of, input_summary, nonfinite_examples
from gradwatch.measure.batch import tensors_of

MAX_EXAMPLES = 4
"""Examples that are listed by index; more are only counted. Judgement."""

CHECK_DATA = "a look at these examples in the data, or torch.nan_to_num(batch) before the model."

MASKS = "which torch.where or a mask removes from the loss, but not from the gradient: 0 times infinity is NaN"


def find_origin(recorder: CallRecorder, loss: Tensor, factor: float, data: object) -> NonfiniteOrigin | None:
    """The origin of the run's first value that is not finite; None where nothing was found.

    `loss`: 0-d, the result of the run, with its graph; `factor`: multiplies it for the backward pass; `data`: the
    batch.
    """
    if finiteness_of(loss):
        return _forward_origin(recorder, _first_causes(recorder.source(loss)), data) or _module_origin(recorder)
    found = None if loss.grad_fn is None else first_nonfinite_node(loss, factor, recorder.calls)
    return None if found is None else _backward_origin(recorder, *found, data)


def origin_in_batch(data: object) -> NonfiniteOrigin | None:
    """The value in the batch itself that is not finite, for a batch that cannot be run again. None where the batch is
    finite except for -inf, which masks contain.
    """
    for path, tensor in tensors_of(data, objects=True):
        numbers = tensor.nan_to_num(torch.nan, torch.inf, 0.0) if tensor.is_floating_point() else tensor
        if state := finiteness_of(numbers):
            where = f"at {path}" if path else "in it"
            there = _examples(*nonfinite_examples([numbers]), data)
            message = (
                f"the batch has {state.word} {where}{there}; unless the model ignores those values, they are the "
                "origin (it could not be run again)."
            )
            return NonfiniteOrigin("batch", message, CHECK_DATA)
    return None


def origin_in_weights(weights: Mapping[str, Tensor]) -> NonfiniteOrigin | None:
    """Which of `weights`, by name, are not finite, where no batch is known that could be run again."""
    lost = tuple(name for name, weight in weights.items() if finiteness_of(weight))
    return NonfiniteOrigin("weights", parameters=lost) if lost else None


# ---- forward


def _first_causes(source: NonfiniteOutput | str | None) -> list[NonfiniteOutput | str]:
    """The calls, parameters and parts of the batch from which a value that is not finite comes, in the order of
    execution, parameters and the batch first.
    """
    found: dict[int, NonfiniteOutput | str] = {}
    seen: set[int] = set()
    waiting = [source]
    while waiting:
        at = waiting.pop()
        if at is None or id(at) in seen:
            continue
        seen.add(id(at))
        if isinstance(at, str):
            found[-1 - len(found)] = at
            continue
        nans = [source for state, source in at.sources if state is Finiteness.NAN]
        infinite = [source for state, source in at.sources if state is Finiteness.INF]
        if at.state is Finiteness.NAN and nans:
            waiting += nans
        elif infinite and not (at.state is Finiteness.NAN and _all_literal(infinite)):
            waiting += infinite
        else:
            found[at.order] = at
    return [found[order] for order in sorted(found)]


def _all_literal(sources: Iterable[NonfiniteOutput | str | None]) -> bool:
    """Whether all of these infinities are constants of the code, as masks are."""
    return all(
        isinstance(root, NonfiniteOutput) and root.literal
        for source in sources
        for root in _first_causes(source) or [""]
    )


def _without_buffers(recorder: CallRecorder, roots: list[NonfiniteOutput | str]) -> list[NonfiniteOutput | str]:
    """`roots` without buffers, which the first run of the batch may have made not finite (statistics of a batch norm, a
    moving average). Where only buffers are left, the first value that came from finite ones or from the batch, if any.
    """
    if not roots or any(isinstance(root, str) and root not in recorder.buffers for root in roots):
        return roots
    made: list[NonfiniteOutput | str] = [root for root in roots if isinstance(root, NonfiniteOutput)]
    if made:
        return made
    for event in recorder.nonfinite_outputs:
        named = [source for _, source in event.sources]
        if not event.literal and all(isinstance(source, str) and source.startswith("batch") for source in named):
            return [name for name in named if name] or [event]
    return roots


def _forward_origin(recorder: CallRecorder, roots: list[NonfiniteOutput | str], data: object) -> NonfiniteOrigin | None:
    roots = _without_buffers(recorder, roots)
    names = [root for root in roots if isinstance(root, str)]
    if parts := [name for name in names if name.startswith("batch")]:
        return _batch_origin(parts[0], data)
    if names:
        return NonfiniteOrigin("weights", parameters=tuple(names))
    if not roots or not isinstance(event := roots[0], NonfiniteOutput):
        return None
    explanation = _explanation(event)
    kind = "NaN" if event.state is Finiteness.NAN else "infinite value"
    message = f"run again, the batch has its first {kind} {_where(recorder, event.call)}, because {explanation.what}"
    message += _examples(event.examples, event.length, data) + "."
    return _call_origin("forward", recorder, event.call, message, explanation)


def _explanation(event: NonfiniteOutput) -> Explanation:
    if event.literal and not any(facts.masked for facts in event.facts) and not event.sources:
        return constant(_short_name(event.call.name), nan=event.state is Finiteness.NAN)
    return forward(event.call.name, event.facts, nan=event.state is Finiteness.NAN, dtype=event.dtype)


def _batch_origin(part: str, data: object) -> NonfiniteOrigin | None:
    tensor = dict(tensors_of(data, objects=True)).get(part.removeprefix("batch"))
    where = f"what the batch has at {part.removeprefix('batch')}" if part != "batch" else "the batch"
    if tensor is None:
        return None
    kind, there = finiteness_of(tensor).word, _examples(*nonfinite_examples([tensor]), data)
    message = f"{where} has {kind} in it{there}, and the loss is computed from it."
    return NonfiniteOrigin("batch", message, CHECK_DATA)


def _module_origin(recorder: CallRecorder) -> NonfiniteOrigin | None:
    """The first module with finite inputs and an output that is not finite, where no recorded call explains it."""
    name = next(filter(None, recorder.nonfinite_modules), "")
    if not name:
        return None
    message = f"run again, {name} is the first module whose input is finite and whose output is not."
    return NonfiniteOrigin("forward", message, f"an epsilon or a clamp in module {name}.", name, True)


# ---- backward


def _backward_origin(
    recorder: CallRecorder, node: str, calls: Sequence[TorchCall | None], dtype: str, data: object
) -> NonfiniteOrigin | None:
    """The origin at `node`; `calls`, `dtype`: as of `first_nonfinite_node`."""
    call = calls[0]
    if call is None:
        return None
    layers = set(recorder.layers)
    near = next((later.module for later in calls if later is not None and later.module in layers), call.after)
    hidden = next((event for event in recorder.nonfinite_outputs if event.call is call), None)
    root = next(iter(_first_causes(hidden)), None) if hidden is not None else None
    if isinstance(root, str):
        if root.startswith("batch"):
            return _batch_origin(root, data)
        return NonfiniteOrigin("weights", parameters=(root,))
    if root is not None and not root.literal:
        explanation = _explanation(root)
        message = (
            f"the loss is finite; run again, the forward pass computes {root.state.word} "
            f"{_where(recorder, root.call)}, because {explanation.what}, {MASKS}."
        )
        remedy = f"torch.where on the input too, so that the masked values are finite; or {explanation.remedy}"
        return _call_origin("backward", recorder, root.call, message, Explanation(explanation.what, remedy), near)
    facts: list[InputSummary] = []
    for value, version in call.singular:
        if not isinstance(value, Tensor) or value._version == version:
            facts += filter(None, [input_summary(value)])
    explanation, where = backward(node, call.name, facts, dtype=dtype), _where(recorder, call)
    if node.endswith("Backward"):  # torch numbers its own
        own = node.removesuffix("Backward")
        explanation = Explanation(
            "its own code computes them", f"a look at the backward method of {own}: a division by 0, an overflow."
        )
        if own == "CheckpointFunction":
            unseen = "the operations inside the checkpoint cannot be observed"
            explanation = Explanation(
                unseen, "checkpoint(..., use_reentrant=False), which makes the operation visible."
            )
        where = f"in the function {own}, before {where.removeprefix('at ')}"
    message = (
        f"the loss is finite; run again, its backward pass has the first gradient that is not ({node}) {where}, "
        f"because {explanation.what}."
    )
    return _call_origin("backward", recorder, call, message, explanation, near)


# ---- messages


def _call_origin(
    source: Any, recorder: CallRecorder, call: TorchCall, message: str, explanation: Explanation, near: str = ""
) -> NonfiniteOrigin:
    site = call.module or near or (call.after if _layer_follows(recorder, call) else "")
    if call.module and call.after and all(layer.startswith(f"{call.module}.") for layer in recorder.layers):
        site = near or call.after  # the module has all layers: its name says nothing
    return NonfiniteOrigin(source, message, explanation.remedy, site, explanation.overflow)


def _layer_follows(recorder: CallRecorder, call: TorchCall) -> bool:
    """Whether a layer ran after the call."""
    return call.layers_before < len(recorder.layers)


def _where(recorder: CallRecorder, call: TorchCall) -> str:
    where = f"at {_short_name(call.name)}"
    if call.module:
        where += f" in module {call.module}"
    elif _layer_follows(recorder, call):
        where += f" after layer {call.after}" if call.after else " before the first layer"
    else:
        where += " in the loss"
    file, number = call.line
    if file:
        line = cut(linecache.getline(file, number).strip())
        where += f" ({Path(file).name}:{number}{f': `{line}`' if line else ''})"
    return where


def _short_name(name: str) -> str:
    """'torch.Tensor.__pow__' -> 'Tensor.pow', 'torch.nn.functional.softmax' -> 'F.softmax'."""
    name = name.replace("torch.nn.functional.", "F.").replace("__", "")
    return name.removeprefix("torch.") if name.startswith("torch.Tensor.") else name


def _examples(indices: tuple[int, ...], length: int, data: object) -> str:
    """', in its example 3', where the values that are not finite are in some examples of the batch only."""
    lengths = {len(tensor) for _, tensor in tensors_of(data) if tensor.ndim}
    if not 0 < len(indices) < length or length not in lengths:
        return ""
    if len(indices) > MAX_EXAMPLES:
        return f", in {len(indices)} of its {length} examples"
    return f", in its example{'s' * (len(indices) > 1)} {', '.join(map(str, indices))} (from 0)"
