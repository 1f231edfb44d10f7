"""Finds the origin of a value that is not finite in a run that was recorded call by call."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from gradwatch.core.history import NonfiniteOrigin
from gradwatch.engine.nan_trace.backward_pass import BackwardTrace
from gradwatch.engine.nan_trace.call_recorder import Call, CallRecorder, Event
from gradwatch.engine.nan_trace.operations import Explanation, Facts, backward, constant, forward
from gradwatch.engine.nan_trace.values import State, examples_in, facts_of, state_of
from gradwatch.measure.batch import tensors_of

MOST_EXAMPLES = 4
"""Examples that are listed; more are only counted. Judgement."""

CODE_WIDTH = 80
"""Characters of a line of code in a sentence. Judgement."""

CHECK_DATA = "a look at these examples in the data, or torch.nan_to_num(batch) before the model."

MASKS = "which torch.where or a mask keeps out of the loss, but not out of the gradient: 0 times infinity is NaN"


def find_origin(recorder: CallRecorder, loss: Tensor, factor: float, data: object) -> NonfiniteOrigin | None:
    """Where the run's first value that is not finite was made. `loss`: 0-d, what the run came to, with its graph;
    `factor`: by which it is multiplied for the backward pass; `data`: the batch. None where nothing was found.
    """
    if state_of(loss):
        return _of_forward(recorder, _roots(recorder.source(loss)), data) or _of_module(recorder)
    if loss.grad_fn is None:
        return None
    descent = BackwardTrace(loss)
    try:
        found = descent.run(loss, factor)
        if found is None:
            return None
        (node, *rest), dtype = found
        name, calls = node.name().rpartition("::")[2], [recorder.call_of(at) for at in (node, *rest)]
        del node, rest, found
        return _of_backward(recorder, name, calls, dtype, data)
    finally:
        descent.close()


def origin_in_batch(data: object) -> NonfiniteOrigin | None:
    """What the batch itself has that is not finite, where it cannot be run again and the loss is lost. None where it is
    finite, but for -inf, which masks are made of.
    """
    for path, tensor in tensors_of(data):
        numbers = tensor.nan_to_num(torch.nan, torch.inf, 0.0) if tensor.is_floating_point() else tensor
        if state := state_of(numbers):
            kind, where = "NaN" if state is State.NAN else "infinity", f"at {path}" if path else "in it"
            there = _examples(*examples_in([numbers]), data)
            story = (
                f"the batch has {kind} {where}{there}; unless the model leaves that out, it is where they come from "
            )
            return NonfiniteOrigin("batch", "", "", "", "", f"{story}(it could not be run again).", CHECK_DATA)
    return None


# ---- forward


def _roots(source: Event | str | None) -> list[Event | str]:
    """What made a value that is not finite, in the order of execution, what was there from the start first."""
    found: dict[int, Event | str] = {}
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
        nans = [source for state, source in at.sources if state is State.NAN]
        infinite = [source for state, source in at.sources if state is State.INF]
        if at.state is State.NAN and nans:
            waiting += nans
        elif infinite and not (at.state is State.NAN and _meant(infinite)):
            waiting += infinite
        else:
            found[at.order] = at
    return [found[order] for order in sorted(found)]


def _meant(sources: Iterable[Event | str | None]) -> bool:
    """Whether all of these infinities were written down in the code, as masks are."""
    return all(isinstance(root, Event) and root.written for source in sources for root in _roots(source) or [""])


def _made_in_the_run(recorder: CallRecorder, roots: list[Event | str]) -> list[Event | str]:
    """`roots` without buffers, which the first run of the batch may have made not finite (statistics of a batch norm, a
    moving average); where nothing else is left, the first value that was made of finite ones or of the batch, if one
    was.
    """
    if not roots or any(isinstance(root, str) and root not in recorder.buffers for root in roots):
        return roots
    made: list[Event | str] = [root for root in roots if isinstance(root, Event)]
    if made:
        return made
    for event in recorder.events:
        named = [source for _, source in event.sources]
        if not event.written and all(isinstance(source, str) and source.startswith("batch") for source in named):
            return [name for name in named if name] or [event]
    return roots


def _of_forward(recorder: CallRecorder, roots: list[Event | str], data: object) -> NonfiniteOrigin | None:
    roots = _made_in_the_run(recorder, roots)
    names = [root for root in roots if isinstance(root, str)]
    if parts := [name for name in names if name.startswith("batch")]:
        return _of_batch(parts[0], data)
    if names:
        return NonfiniteOrigin("weights", "", "", "", "", "", "", parameters=tuple(names))
    if not roots or not isinstance(event := roots[0], Event):
        return None
    explanation = _explanation(event)
    kind = "NaN" if event.state is State.NAN else "infinite value"
    story = f"run again, the batch gives its first {kind} {_where(recorder, event.call)}, because {explanation.what}"
    story += _examples(event.examples, event.length, data) + "."
    return _trace("forward", recorder, event.call, story, explanation)


def _explanation(event: Event) -> Explanation:
    if event.written and not any(facts.masked for facts in event.facts) and not event.sources:
        return constant(_short(event.call.name), nan=event.state is State.NAN)
    return forward(event.call.name, event.facts, nan=event.state is State.NAN, dtype=event.dtype)


def _of_batch(part: str, data: object) -> NonfiniteOrigin | None:
    tensor = dict(tensors_of(data)).get(part.removeprefix("batch"))
    where = f"what the batch has at {part.removeprefix('batch')}" if part != "batch" else "the batch"
    if tensor is None:
        return None
    kind = "NaN" if state_of(tensor) is State.NAN else "infinity"
    places, length = examples_in([tensor])
    story = f"{where} has {kind} in it{_examples(places, length, data)}, and the loss is made of it."
    return NonfiniteOrigin("batch", "", "", "", "", story, CHECK_DATA)


def _of_module(recorder: CallRecorder) -> NonfiniteOrigin | None:
    """The first module with finite inputs and an output that is not, where no recorded call made it."""
    bad = [ran.module for ran in recorder.ran if not ran.came and ran.went]
    for place, name in enumerate(bad):
        inner = any(not name or other.startswith(f"{name}.") for other in bad[place + 1 :])
        if name and not inner:
            story = f"run again, {name} is the first module to give what is not finite of what is."
            return NonfiniteOrigin(
                "forward", name, name, "", "", story, f"an epsilon or a clamp in module {name}.", True
            )
    return None


# ---- backward


def _of_backward(
    recorder: CallRecorder, node: str, calls: Sequence[Call | None], dtype: str, data: object
) -> NonfiniteOrigin | None:
    """`node` made what is not finite; `calls` made it, and the nodes to which that came, the nearest first."""
    call = calls[0]
    if call is None:
        return None
    layers = set(recorder.layers)
    near = next((later.module for later in calls if later is not None and later.module in layers), call.after)
    hidden = next((event for event in recorder.events if event.call is call), None)
    root = next(iter(_roots(hidden)), None) if hidden is not None else None
    if isinstance(root, str):
        if root.startswith("batch"):
            return _of_batch(root, data)
        return NonfiniteOrigin("weights", "", "", "", "", "", "", parameters=(root,))
    if root is not None and not root.written:
        explanation = _explanation(root)
        story = f"the loss is finite; run again, the batch gives {_kind(root)} {_where(recorder, root.call)}, because "
        story += f"{explanation.what}, {MASKS}."
        return _trace(
            "backward", recorder, root.call, story, Explanation(explanation.what, _inside(explanation.remedy)), near
        )
    facts: list[Facts] = []
    for value, version in call.singular:
        if not isinstance(value, Tensor) or value._version == version:
            facts += filter(None, [facts_of(value)])
    explanation, where = backward(node, call.name, facts, dtype=dtype), _where(recorder, call)
    if node.endswith("Backward"):  # torch numbers its own
        own = node.removesuffix("Backward")
        explanation = Explanation(
            "it makes them itself", f"a look at the backward method of {own}: a division by 0, an overflow."
        )
        if own == "CheckpointFunction":
            unseen = "what is checkpointed runs out of sight there"
            explanation = Explanation(unseen, "checkpoint(..., use_reentrant=False), with which the operation is seen.")
        where = f"in the function {own}, before {where.removeprefix('at ')}"
    story = (
        f"the loss is finite; run again, its backward pass makes the first gradient that is not ({node}) {where}, "
        f"because {explanation.what}."
    )
    return _trace("backward", recorder, call, story, explanation, near)


def _inside(remedy: str) -> str:
    return f"torch.where on the input too, so that what is hidden is finite; or {remedy}"


# ---- words


def _trace(
    source: Any, recorder: CallRecorder, call: Call, story: str, explanation: Explanation, near: str = ""
) -> NonfiniteOrigin:
    site = call.module or near or (call.after if _goes_on(recorder, call) else "")
    return NonfiniteOrigin(
        source, call.module, site, _short(call.name), call.line.place, story, explanation.remedy, explanation.overflow
    )


def _goes_on(recorder: CallRecorder, call: Call) -> bool:
    """Whether a layer ran after the call."""
    return bool(recorder.layers) and call.layers_before < len(recorder.layers)


def _where(recorder: CallRecorder, call: Call) -> str:
    where = f"at {_short(call.name)}"
    if call.module:
        where += f" in module {call.module}"
    elif _goes_on(recorder, call):
        where += f" after layer {call.after}" if call.after else " before the first layer"
    else:
        where += " in the loss"
    if call.line.place:
        text = call.line.text
        text = text if len(text) <= CODE_WIDTH else text[: CODE_WIDTH - 3] + "..."
        where += f" ({call.line.place}: `{text}`)"
    return where


def _kind(event: Event) -> str:
    return "NaN" if event.state is State.NAN else "infinity"


def _short(name: str) -> str:
    """'torch.Tensor.__pow__' -> 'Tensor.pow', 'torch.nn.functional.softmax' -> 'F.softmax'."""
    name = name.replace("torch.nn.functional.", "F.").replace("__", "")
    return name.removeprefix("torch.") if name.startswith("torch.Tensor.") else name


def _examples(places: tuple[int, ...], length: int, data: object) -> str:
    """', in its example 3', where what is not finite is in some examples of the batch only."""
    lengths = {len(tensor) for _, tensor in tensors_of(data) if tensor.ndim}
    if not 0 < len(places) < length or length not in lengths:
        return ""
    if len(places) > MOST_EXAMPLES:
        return f", in {len(places)} of its {length} examples"
    return f", in its example{'s' * (len(places) > 1)} {', '.join(map(str, places))} (from 0)"
