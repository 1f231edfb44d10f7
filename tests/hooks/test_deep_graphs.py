"""However deep a graph is, whatever looks at it ends no process: each of these alone in one, on small stacks too."""

from __future__ import annotations

import gc
import json
import os
import threading
import weakref
from typing import Any

import pytest
import torch

import forks
from gradwatch.hooks.graph_release import NEXT_NODES, metadata_of, release_in_a_loop, unprepared_calls

SMALL = {"stack": 256}
"""In kB: 900 to 1,200 nodes in a row that Python knows overflow it, and with it 100 kB are enough without us."""

TRAININGS: dict[str, tuple[str, dict[str, Any]]] = {
    "30,000 nodes": ("nodes", {"size": 30_000}),
    "30,000 calls": ("calls", {"size": 30_000, "activations": False}),
    "auto": ("cell summed", {"size": 1_100, **SMALL}),
    "auto, deeper": ("residual nodes tapped", {"size": 3_000, **SMALL}),
    "full": ("cell", {"size": 1_100, "signals": "full", **SMALL}),
    "off": ("cell nodes", {"size": 1_100, "signals": "off", **SMALL}),
    "clipped signals": ("calls", {"size": 2_500, "signals": "off", "clipped": True, **SMALL}),
    "toolbox": ("calls summed", {"size": 1_100, "act": "tools", **SMALL}),
    "gradcam": ("images", {"size": 1_100, "act": "maps", **SMALL}),
}

EDGES = {"residual": 2_999, "nodes": 1}
"""How many edges the data flow has between layers."""


def play(shapes: str, **options: Any) -> list[dict[str, Any]]:
    """What `deep_graphs.run` says of each of `shapes`: it has to come to its end."""
    arguments = ", ".join([*map(repr, shapes.split()), *(f"{name}={value!r}" for name, value in options.items())])
    env = {**os.environ, "PYTHONPATH": forks.search_path()}
    done = forks.run(["-c", f"import deep_graphs; deep_graphs.run({arguments})"], env=env)
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    whole = done.returncode == 0 and [one["shape"] for one in said] == shapes.split()
    assert whole, f"{done.returncode} after {said}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    return said


@pytest.mark.slow
@pytest.mark.parametrize("case", TRAININGS)
def test_a_training_ends_as_without_us_however_deep_its_graph(case: str) -> None:
    shapes, options = TRAININGS[case]
    for said in play(shapes, **options):
        assert said["same"], said
        assert not said.get("failed"), said
        if said["shape"] in EDGES and "signals" not in options:
            assert said["edges"] == EDGES[said["shape"]], said


@pytest.mark.slow
@pytest.mark.parametrize("signals", ["auto", "off"])
def test_a_nan_behind_a_deep_graph_is_traced(signals: str) -> None:
    (said,) = play("nodes", size=1_500, act="fit_two_steps", fault=True, signals=signals, **SMALL)
    assert said["same"]
    assert not said["failed"]
    (alert,) = said["alerts"]
    assert "its first NaN at Tensor.log in module gate" in alert


@pytest.mark.slow
@pytest.mark.parametrize("act", ["loop", "tools"])
def test_a_deeply_nested_output_is_looked_into_as_far_as_it_is_reasonable(act: str) -> None:
    (said,) = play("linked", size=750, act=act, **SMALL)
    assert said["same"]
    assert not said.get("failed")


@pytest.mark.slow
def test_a_graph_that_python_has_seen_all_of_is_freed_on_a_small_stack() -> None:
    play("mixed", size=5_000, act="look", stack=64)


def test_how_many_calls_need_no_preparation_follows_from_the_stack_of_the_thread() -> None:
    before, found = threading.stack_size(2**19), []
    try:
        thread = threading.Thread(target=lambda: found.append(unprepared_calls()))
        thread.start()
        thread.join()
    finally:
        threading.stack_size(before)
    assert found == [2**19 // 4 // 900]
    assert unprepared_calls() >= found[0]


def chain(size: int) -> torch.Tensor:
    x = torch.ones(1, requires_grad=True)
    for _ in range(size):
        x = x * 1.0
    return x


class Mark:
    """Something that can be referred to weakly."""


def test_what_is_kept_with_a_node_goes_at_once_when_its_graph_goes() -> None:
    loss = chain(100).sum()
    release_in_a_loop(loss.grad_fn)
    node: Any = loss.grad_fn
    marks = []
    while node.next_functions:
        leads_to_a_leaf = not node.next_functions[0][0].next_functions
        assert (NEXT_NODES in metadata_of(node)) is not leads_to_a_leaf
        mark = metadata_of(node)["mark"] = Mark()
        marks.append(weakref.ref(mark))
        node = node.next_functions[0][0]
    assert len(marks) == 101
    assert NEXT_NODES not in metadata_of(node), "the node of a leaf may live as long as the leaf"
    del node, mark
    gc.disable()
    try:
        assert all(mark() is not None for mark in marks)
        del loss
        assert all(mark() is None for mark in marks)
    finally:
        gc.enable()


def test_a_part_of_a_graph_that_others_need_stays() -> None:
    x = chain(50)
    first, second = x * 2, x * 3
    release_in_a_loop(first.grad_fn, second.grad_fn)
    del first
    (gradient,) = torch.autograd.grad(second.sum(), x, retain_graph=True)
    assert gradient == 3
    second.sum().backward()
