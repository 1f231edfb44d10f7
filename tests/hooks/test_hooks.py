"""Hooks see what flows and are gone when asked: frozen parameters, in-place edits, any output, copies, leaks."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from gradwatch.hooks import garbage_collector
from gradwatch.hooks.garbage_collector import no_collections
from gradwatch.hooks.hook_set import (
    MAX_DEPTH,
    HookCosts,
    HookSet,
    OutputHook,
    after_backward,
    is_hooked_by_others,
    tensors_in,
)
from gradwatch.hooks.view_gradients import register_value_hook
from models import STRUCTURES, TwoOutputs
from quick import examples
from reference import hooks_on


class Handle:
    def __init__(self) -> None:
        self.removed = 0

    def remove(self) -> None:
        self.removed += 1


def nothing(*args: Any) -> None: ...


def hook_outputs(hooks: HookSet, module: nn.Module, on_grad_output: Any, on_call: Any, *, full: bool = False) -> None:
    hook = OutputHook(HookCosts(), full=full)
    hook.on_grad_output, hook.on_call = on_grad_output, on_call
    hooks.add(module.register_forward_hook(hook))


def test_remove_twice_removes_once() -> None:
    hooks, handles = HookSet(), [Handle() for _ in range(3)]
    for handle in handles:
        hooks.add(handle)
    assert len(hooks) == 3
    hooks.remove()
    hooks.remove()
    assert [handle.removed for handle in handles] == [1, 1, 1]
    assert len(hooks) == 0


def test_a_context_removes_after_a_failure() -> None:
    layer = nn.Linear(2, 2)

    def fails() -> None:
        with HookSet() as hooks:
            hooks.on_gradient(layer.weight, lambda gradient: None)
            hook_outputs(hooks, layer, nothing, nothing)
            assert len(hooks_on(layer)) == 2
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert hooks_on(layer) == []


@pytest.mark.parametrize("frozen", [False, True])
def test_gradient_of_a_parameter(frozen: bool) -> None:
    """Of a frozen one when it is thawed; whether it is frozen does not change."""
    layer, seen = nn.Linear(2, 2).requires_grad_(not frozen), []
    with HookSet() as hooks:
        for parameter in layer.parameters():
            hooks.on_gradient(parameter, lambda gradient: seen.append(gradient))
            assert parameter.requires_grad is not frozen
            assert parameter.grad is None
        layer.requires_grad_(True)
        layer(torch.ones(1, 2)).sum().backward()
        assert len(seen) == 2
        layer.requires_grad_(False)
    assert hooks_on(layer) == []


def test_a_parameter_that_can_never_have_a_gradient() -> None:
    whole = nn.Parameter(torch.ones(3, dtype=torch.int8), requires_grad=False)
    with HookSet() as hooks:
        hooks.on_gradient(whole, lambda gradient: None)
    assert not whole.requires_grad


def test_a_failed_registration_leaves_the_parameter_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any) -> None:
        raise ZeroDivisionError

    parameter = nn.Parameter(torch.ones(2), requires_grad=False)
    monkeypatch.setattr(nn.Parameter, "register_hook", fails)
    with pytest.raises(ZeroDivisionError), HookSet() as hooks:
        hooks.on_gradient(parameter, lambda gradient: None)
    assert not parameter.requires_grad


@pytest.mark.parametrize("wrap", STRUCTURES)
def test_outputs_in_any_wrapping(wrap: str) -> None:
    module = TwoOutputs(STRUCTURES[wrap])
    arrived: list[Tensor] = []
    with HookSet() as hooks:
        hook_outputs(hooks, module, arrived.append, nothing)
        outputs = list({id(t): t for t in tensors_in(module(torch.ones(2), text="hello"))}.values())
        (outputs[0].sum() * 3 + outputs[1].sum() * 5).backward()
    distinct = sorted({float(gradient[0]) for gradient in arrived})
    assert distinct == [3.0, 5.0]
    if wrap != "same twice":
        assert len(arrived) == 2


def test_an_output_given_out_twice_arrives_once() -> None:
    module = TwoOutputs(STRUCTURES["same twice"])
    arrived: list[Tensor] = []
    with HookSet() as hooks:
        hook_outputs(hooks, module, arrived.append, nothing)
        module(torch.ones(2))[0].sum().backward()
    assert len(arrived) == 1


@pytest.mark.parametrize(
    "edit",
    [
        lambda y: y.relu_(),
        lambda y: y.mul_(2),
        lambda y: y.add_(1),
        lambda y: torch.dropout_(y, 0.5, True),
        lambda y: y,
    ],
    ids=["relu_", "mul_", "add_", "dropout_", "none"],
)
@pytest.mark.parametrize("shape", [(3, 5), (2, 3, 5)], ids=["whole", "view"])
def test_outputs_edited_in_place(edit: Any, shape: tuple[int, ...]) -> None:
    """The gradient is with respect to what the module gave out, before the edit; of three dimensions that is a view."""
    torch.manual_seed(0)
    layer, x = nn.Linear(5, 5), torch.randn(shape)
    torch.manual_seed(1)
    output = layer(x)
    leaf = output.detach().requires_grad_()
    edit(leaf * 1).square().sum().backward()
    arrived: list[Tensor] = []
    with HookSet() as hooks:
        hook_outputs(hooks, layer, arrived.append, nothing)
        torch.manual_seed(1)
        edit(layer(x)).square().sum().backward()
    assert len(arrived) == 1
    assert torch.equal(arrived[0], leaf.grad)  # type: ignore[arg-type]


class GivesParts(nn.Module):
    """Gives out two views of one tensor, of which the second is turned round."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 6))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        whole = x @ self.weight
        return whole[..., :2], whole[..., 2:].transpose(-2, -1)


def test_a_hook_on_a_view_does_not_hold_its_memory() -> None:
    view = nn.Linear(3, 3)(torch.ones(4, 3)).view(2, 2, 3)
    assert view._base is not None
    memory, total = StorageWeakRef(view.untyped_storage()), view.sum()
    register_value_hook(view, lambda gradient: None)
    del view
    assert memory.expired()
    total.backward()


def test_views_used_before_and_after_an_edit_in_place() -> None:
    """The parts of their gradients are reported together, and each view's own."""

    def gradients(module: nn.Module, x: Tensor, *, edited: bool) -> list[Tensor]:
        arrived: list[Tensor] = []
        with HookSet() as hooks:
            hook_outputs(hooks, module, arrived.append, nothing)
            a, b = module(x)
            before = (a + 1).sum()
            a = a.mul_(3) if edited else a * 3
            ((a.square()).sum() + before + (2 * b).square().sum()).backward()
        return sorted(arrived, key=lambda gradient: gradient.shape)

    torch.manual_seed(0)
    module, x = GivesParts(), torch.randn(5, 4)
    for mine, reference in zip(gradients(module, x, edited=True), gradients(module, x, edited=False), strict=True):
        assert torch.equal(mine, reference)


def test_outputs_that_are_leaves_keep_no_hook() -> None:
    """A module that gives out its parameter or its input: a hook there would stay for ever."""

    class GivesLeaves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.weight, x

    module, x = GivesLeaves(), torch.ones(2, requires_grad=True)
    with HookSet() as hooks:
        hook_outputs(hooks, module, nothing, nothing)
        a, b = module(x)
        (a * b).sum().backward()
    assert hooks_on(module) == []
    assert not x._backward_hooks


def test_calls_without_gradients_are_counted_too() -> None:
    layer, runs, arrived = nn.Linear(2, 2), [], []
    with HookSet() as hooks:
        hook_outputs(hooks, layer, arrived.append, lambda: runs.append(1))
        with torch.no_grad():
            layer(torch.ones(1, 2))
        with torch.inference_mode():
            layer(torch.ones(1, 2))
        layer(torch.ones(1, 2)).sum().backward()
    assert len(runs) == 3
    assert len(arrived) == 1


def test_activations_are_let_go() -> None:
    """A hook that captured its own output would leak one activation a step."""
    layer = nn.Linear(4, 4)
    with HookSet() as hooks:
        hook_outputs(hooks, layer, nothing, nothing)
        output = layer(torch.ones(2, 4))
        gone = weakref.ref(output)
        output.sum().backward()
        del output
        gc.collect()
        assert gone() is None


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies_do_nothing(duplicate: Any) -> None:
    layer, reported = nn.Linear(2, 2), []
    with HookSet() as hooks:
        hook_outputs(hooks, layer, reported.append, lambda: reported.append(None))
        hooks.on_gradient(layer.weight, lambda gradient: reported.append(gradient))
        duplicated = duplicate(layer)
        duplicated(torch.ones(1, 2)).sum().backward()
        assert reported == []
        layer(torch.ones(1, 2)).sum().backward()
        assert len(reported) == 3


@given(
    st.recursive(
        st.one_of(st.none(), st.integers(), st.text(max_size=3), st.just("tensor")),
        lambda inner: st.one_of(
            st.lists(inner, max_size=4),
            st.lists(inner, max_size=4).map(tuple),
            st.dictionaries(st.text(max_size=2), inner, max_size=4),
        ),
        max_leaves=20,
    )
)
@examples(100)
def test_every_tensor_of_any_nest_is_found(nest: Any) -> None:
    made: list[Tensor] = []

    def fill(value: Any) -> Any:
        if value == "tensor":
            made.append(torch.zeros(1))
            return made[-1]
        if isinstance(value, dict):
            return {key: fill(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(fill(item) for item in value)
        return value

    found = list(tensors_in(fill(nest)))
    assert [id(tensor) for tensor in found] == [id(tensor) for tensor in made]


def test_a_nest_that_holds_itself_is_searched_so_far() -> None:
    sequence: list[Any] = [torch.zeros(1)]
    mapping: dict[str, Any] = {"tensor": torch.zeros(1)}
    sequence.append(sequence)
    mapping["self"] = mapping
    for nest in (sequence, mapping):
        assert len(list(tensors_in(nest))) == MAX_DEPTH


@pytest.mark.parametrize("accumulated", [False, True])
def test_a_parameter_is_as_if_it_had_never_been_hooked(accumulated: bool) -> None:
    """Torch's dict of hooks is removed with GradWatch's last hook, and stays where the user has one."""
    dict_of, register = "_backward_hooks", "register_hook"
    if accumulated:
        dict_of, register = "_post_accumulate_grad_hooks", "register_post_accumulate_grad_hook"
    alone, shared = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    seen: list[Tensor] = []
    users = getattr(shared, register)(seen.append)
    with HookSet() as hooks:
        for parameter in (alone, shared):
            hooks.on_gradient(parameter, lambda gradient: None, accumulated=accumulated)
        assert getattr(alone, dict_of)
    assert getattr(alone, dict_of) is None
    assert len(getattr(shared, dict_of) or ()) == 1
    (alone + shared).sum().backward()
    assert len(seen) == 1
    users.remove()


def test_full_backward_hooks_measure_the_same_and_leave_nothing_behind() -> None:
    module = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    reported: dict[bool, list[Tensor]] = {False: [], True: []}
    for full, arrived in reported.items():
        with HookSet() as hooks:
            for layer in (module[0], module[2]):
                hook_outputs(hooks, layer, arrived.append, lambda: None, full=full)
            module(torch.ones(5, 4, requires_grad=True)).square().sum().backward()
    assert len(reported[True]) == 2
    assert all(map(torch.equal, reported[True], reported[False]))
    assert all(layer._is_full_backward_hook is None and not layer._backward_hooks for layer in module)


def test_the_collector_of_cycles_is_as_it_was_when_hooks_are_made() -> None:
    before = gc.get_threshold()
    try:
        with no_collections():
            assert gc.get_threshold()[0] == garbage_collector.PAUSED
            with no_collections():
                pass
            assert gc.get_threshold()[0] == garbage_collector.PAUSED
        assert gc.get_threshold() == before
        with pytest.raises(RuntimeError, match="refused"), no_collections():
            raise RuntimeError("refused")
        assert gc.get_threshold() == before
        with no_collections():
            gc.set_threshold(500, 5, 5)
        assert gc.get_threshold() == (500, 5, 5), "the user's own"
        gc.set_threshold(0)
        with no_collections():
            assert gc.get_threshold()[0] == 0
        assert gc.get_threshold()[0] == 0
        assert gc.isenabled()
    finally:
        gc.set_threshold(*before)


def test_what_is_to_be_called_after_a_backward_pass() -> None:
    """Once, when every gradient has been added up; not at the next pass, and not after one that fails."""
    weight, seen = nn.Parameter(torch.ones(2)), []
    handle = weight.register_hook(lambda gradient: after_backward(lambda: seen.append(weight.grad is not None)))
    weight.sum().backward()
    handle.remove()
    assert seen == [True]
    weight.sum().backward()
    assert seen == [True]


def test_hooks_of_others_on_added_up_gradients() -> None:
    weight = nn.Parameter(torch.ones(2))
    assert not is_hooked_by_others(weight)
    handle = weight.register_post_accumulate_grad_hook(lambda parameter: None)
    assert is_hooked_by_others(weight)
    handle.remove()
    assert not is_hooked_by_others(weight)
