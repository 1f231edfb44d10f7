"""The safe backward hook runs where torch's own breaks, says the same where that runs, and disturbs nothing."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import quick
from gradwatch import backward_hook, edit
from gradwatch.hooks.hook_set import in_backward
from gradwatch.toolbox.graph_uses import next_node_number, number_of
from gradwatch.toolbox.nested_tensors import distinct
from gradwatch.toolbox.user_functions import EditedInPlace
from models import STRUCTURES, TwoOutputs
from reference import bits, hooks_on
from torchvision_networks import FAMILIES, DenseLayer, images, made

Seen = dict[str, list[tuple[Sequence[Tensor | None], Sequence[Tensor | None]]]]


def nothing(*_: object) -> None: ...


def gradients_seen(model: nn.Module, how: str, run: Callable[[], Tensor], *, lists: bool = False) -> Seen:
    """What the hooks on all modules below `model` see in a backward pass from the sum of squares of what `run` gives.

    `lists`: on those that are given a list too, which torch's own cannot see into.
    """
    seen: Seen = {}
    with ExitStack() as stack:
        for name, module in model.named_modules():
            if name and (lists or not isinstance(module, DenseLayer)):
                calls = seen.setdefault(name, [])
                hook = lambda _, into, out, calls=calls: calls.append((into, out))  # noqa: E731
                stack.enter_context(backward_hook(module, hook, how=how))
        run().square().sum().backward()
    return {name: calls for name, calls in seen.items() if calls}


def same(one: Any, other: Any) -> bool:
    """Bit for bit, whatever the nest."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one is other


def run_family(model: nn.Module, step: int = 0) -> Tensor:
    torch.manual_seed(7)
    return model(images(step) * 1)


@pytest.mark.parametrize("name", quick.cases(FAMILIES, quick.NETWORKS))
def test_in_place_modules_are_seen_as_torch_sees_them_out_of_place(name: str) -> None:
    """Every module, leaves and containers: grad_input and grad_output, bit for bit."""
    mine, reference = made(name, inplace=True), made(name, inplace=False)
    safe = gradients_seen(mine, "safe", lambda: run_family(mine))
    full = gradients_seen(reference, "full", lambda: run_family(reference))
    assert len(safe) > 8
    assert safe.keys() == full.keys()
    for module, calls in full.items():
        assert same(safe[module], calls), module
    assert hooks_on(mine) == []


@pytest.mark.parametrize("name", quick.cases(FAMILIES, quick.NETWORKS))
def test_torch_breaks_on_them_and_says_where(name: str) -> None:
    model = made(name, inplace=True)
    words = r"torch's full backward hook on .*edited in place .*use how='safe', or edit out of place"
    with pytest.raises(EditedInPlace, match=words) as caught:
        gradients_seen(model, "full", lambda: run_family(model))
    assert "modified inplace" in str(caught.value.__cause__)
    assert hooks_on(model) == []


@pytest.mark.parametrize("name", quick.cases(FAMILIES, quick.NETWORKS))
def test_training_is_bit_identical(name: str) -> None:
    def train(hooked: bool) -> dict[str, bytes]:
        model = made(name, inplace=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(3):
            optimizer.zero_grad()
            if hooked:
                gradients_seen(model, "safe", lambda step=step: run_family(model, step), lists=True)
            else:
                run_family(model, step).square().sum().backward()
            optimizer.step()
        return bits(model)

    assert train(True) == train(False)


def test_the_error_names_the_module_that_was_edited() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 4), nn.ReLU(inplace=True))
    second = backward_hook(model[2], nothing, how="full", name="the second")
    first = backward_hook(model[0], nothing, how="full", name="the first")
    with pytest.raises(EditedInPlace, match="hook on the second: "), second, first:
        model(torch.ones(1, 3, requires_grad=True))


def test_the_error_for_a_view_of_the_output() -> None:
    layer = nn.Linear(3, 3)
    hook = backward_hook(layer, nothing, how="full", name="the layer")
    with pytest.raises(EditedInPlace, match="hook on the layer: "), hook:
        layer(torch.ones(1, 3, requires_grad=True))[0].zero_()


def test_other_errors_pass_as_they_are() -> None:
    layer = nn.Linear(3, 3)
    with pytest.raises(RuntimeError, match="cannot be multiplied"), backward_hook(layer, nothing, how="full"):
        layer(torch.ones(1, 2))


class Takes(nn.Module):
    """Takes its tensors in any wrapping, by position and keyword."""

    def forward(self, nest: Any, *, scale: Tensor, power: int = 1) -> Tensor:
        a, b = (nest["a"], nest["b"][0]) if isinstance(nest, dict) else (nest[0], nest[1][0])
        return (a * 2 + b**power) * scale


@pytest.mark.parametrize("wrap", [lambda a, b: {"a": a, "b": [b]}, lambda a, b: [a, (b, None)]])
def test_inputs_in_any_wrapping(wrap: Callable[[Tensor, Tensor], Any]) -> None:
    a, b, scale = (torch.full((2,), value, requires_grad=True) for value in (1.0, 2.0, 3.0))
    seen: list[Any] = []
    module = Takes()
    with backward_hook(module, lambda m, into, out: seen.append((m, into, out))):
        module(wrap(a, b), scale=scale, power=2).sum().backward()
    ((who, into, out),) = seen
    assert who is module
    assert [gradient.tolist() for gradient in into] == [[6.0] * 2, [12.0] * 2, [6.0] * 2]
    assert [gradient.tolist() for gradient in out] == [[1.0] * 2]


@pytest.mark.parametrize("wrap", STRUCTURES)
def test_outputs_in_any_wrapping(wrap: str) -> None:
    module, x, seen = TwoOutputs(STRUCTURES[wrap]), torch.ones(2, requires_grad=True), []
    with backward_hook(module, lambda _, into, out: seen.append((into, out))):
        outputs = distinct(module(x, text="hello"))
        (outputs[0].sum() * 3 + outputs[1].sum() * 5).backward()
    ((into, out),) = seen
    assert [gradient.tolist() for gradient in out] == [[3.0] * 2, [5.0] * 2]
    assert torch.equal(into[0], x.grad)


def gradients_with(hook: Any, how: str) -> list[Tensor | None]:
    """Of two inputs and of the weight, with `hook` on a bilinear layer whose inputs others use too."""
    torch.manual_seed(0)
    layer = nn.Bilinear(3, 4, 2)
    a, b = torch.randn(5, 3, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    x, y = a * 1, b * 1
    with backward_hook(layer, hook, how=how):
        (layer(x, y).square().sum() + x.exp().sum() + y.sin().sum()).backward()
    return [a.grad, b.grad, layer.weight.grad]


@pytest.mark.parametrize(
    "hook",
    [
        nothing,
        lambda _, into, out: (into[0] * 3, into[1] - 1),
        # each of the new ones needs both of the old, and the output's
        lambda _, into, out: (into[0] * into[1].norm() + out[0].sum(), into[1] + into[0].mean()),
    ],
)
def test_what_it_returns_replaces_grad_input_as_in_torch(hook: Any) -> None:
    assert same(gradients_with(hook, "safe"), gradients_with(hook, "full"))


def test_one_input_may_have_its_gradient_alone() -> None:
    layer, x = nn.Tanh(), torch.ones(3, requires_grad=True)
    with backward_hook(layer, lambda _, into, out: out[0] * 7):
        layer(x * 1).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 7.0))


def test_none_for_one_of_several_is_no_gradient() -> None:
    grads = gradients_with(lambda _, into, out: (None, into[1]), "safe")
    only = gradients_with(lambda _, into, out: (into[0] * 0, into[1]), "safe")
    assert same(grads, only)


@pytest.mark.parametrize(
    ("returned", "error", "words"),
    [
        (lambda into: 3, TypeError, "returned int: expected a tuple"),
        (lambda into: (into[0], into[0]), ValueError, "returned 2 gradients: expected 1"),
        (lambda into: into[0][:1], ValueError, r"was given \[2, 3\] float32 on cpu and returned \[1, 3\]"),
        (lambda into: into[0].double(), ValueError, "returned .* float64"),
        (lambda into: (3,), TypeError, "for input 0, returned int: expected a tensor"),
        (lambda into: into[0].mul_(2), EditedInPlace, "edits a gradient in place"),
    ],
)
def test_what_does_not_fit_names_the_module(returned: Any, error: type[Exception], words: str) -> None:
    layer = nn.Linear(3, 4)
    with (
        backward_hook(layer, lambda _, into, out: returned(into), name="head"),
        pytest.raises(error, match=f"the backward hook on head.*{words}"),
    ):
        layer(torch.ones(2, 3, requires_grad=True) * 1).square().sum().backward()
    assert hooks_on(layer) == []


class Joins(nn.Module):
    """Edits one or both of its inputs in place."""

    def __init__(self, *, both: bool = False) -> None:
        super().__init__()
        self.both = both

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.both:
            y *= 3
        x += y
        return x


@pytest.mark.parametrize("both", [False, True])
def test_a_module_that_edits_its_inputs(both: bool) -> None:
    """dL/d(input) is of before the edit, and through the module alone."""
    a, b = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    seen: list[Any] = []
    with backward_hook(module := Joins(both=both), lambda _, into, out: seen.append((into, out))):
        x, y = a * 1, b * 1
        before = x + 5  # uses the old value too, and is no business of the module's
        out = module(x, y)
        assert out is x
        (x * 2 + before * 10).sum().backward()
    assert a.grad.tolist() == [12.0] * 2
    assert b.grad.tolist() == [6.0 if both else 2.0] * 2
    ((into, _),) = seen
    assert [gradient.tolist() for gradient in into] == [[2.0] * 2, [6.0 if both else 2.0] * 2]


@dataclass
class State:
    x: Any
    made: Any = None


class Writes(nn.Module):
    """Writes its results, and its input, into the containers that it is given."""

    def forward(self, items: list[Any], *, named: dict[str, Any], state: State) -> None:
        items += [items.pop(), items[0] * 3]
        named["deep"][0]["y"] = named.pop("x") * 2
        state.made = state.x * 5


def test_what_a_module_writes_into_its_arguments_reaches_its_caller() -> None:
    x = torch.ones(2, requires_grad=True)
    with backward_hook(module := Writes(), nothing):
        given = x * 1
        items, named, state = [given, [(given,)]], {"x": given, "deep": ({"z": given},)}, State(given)
        module(items, named=named, state=state)
    assert items[0] is items[1][0][0] is given
    assert list(named) == ["deep"]
    assert named["deep"][0]["z"] is state.x is given
    (items[2] + named["deep"][0]["y"] + state.made).sum().backward()
    assert x.grad.tolist() == [10.0] * 2


@dataclass(frozen=True)
class FrozenState:
    x: Any
    made: Any = None


class WritesOnce(nn.Module):
    """Writes into one of two containers, which may be the same."""

    def forward(self, items: list[Any], named: dict[str, list[Any]], state: FrozenState) -> Any:
        items.append(items[0] * 2)
        object.__setattr__(state, "made", state.x * 3)
        return named["deep"][-1] * 5


def test_a_container_that_a_module_is_given_twice_is_one_also_with_hooks() -> None:
    x = torch.ones(2, requires_grad=True)
    with backward_hook(module := WritesOnce(), nothing):
        items, state = [x * 1], FrozenState(x * 1)
        out = module(items, {"deep": items}, state)
    assert out.tolist() == [10.0] * 2
    assert len(items) == 2
    assert state.made.tolist() == [3.0] * 2


def test_a_new_gradient_for_an_edited_input() -> None:
    x = torch.tensor([-1.0, 2.0], requires_grad=True)
    with backward_hook(module := nn.ReLU(inplace=True), lambda _, into, out: into[0] * 5):
        module(x * 1).sum().backward()
    assert x.grad.tolist() == [0.0, 5.0]
    a, b = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    with (
        backward_hook(module := Joins(), lambda _, into, out: (into[0] * 2, into[1])),
        pytest.raises(RuntimeError, match="new gradient for input 0, which the module edits in place"),
    ):
        module(a * 1, b * 1).sum().backward()


@pytest.mark.parametrize(
    "module",
    [nn.Flatten(), nn.Identity(), nn.Dropout(0.0).eval(), nn.Sequential(), nn.Unflatten(1, (2, 2))],
    ids=lambda module: type(module).__name__,
)
@pytest.mark.parametrize("edit", [lambda y: y.relu_(), lambda y: y.add_(1).mul_(3), lambda y: y[:, :1].zero_()])
def test_views_edited_by_whom_they_were_given_to(module: nn.Module, edit: Any) -> None:
    """Autograd leads past a view that is edited in place; the gradient is that of the out-of-place reference."""
    torch.manual_seed(0)
    x = torch.randn(3, 4, requires_grad=True)

    def run(first: Callable[[Tensor], Tensor]) -> Tensor:
        h = x * 1
        y = first(h)
        edit(y)
        return (y.square().sum() + h.sin().sum()).sum()

    alone = torch.autograd.grad(run(module), x)[0]
    leaf = module(x.detach()).clone().requires_grad_()
    expected = torch.autograd.grad(run_from(leaf, edit), leaf)[0]
    seen: list[Any] = []
    with backward_hook(module, lambda _, into, out: seen.append((into, out))):
        got = torch.autograd.grad(run(module), x)[0]
    assert torch.equal(got, alone)
    ((into, out),) = seen
    torch.testing.assert_close(out[0], expected)
    assert torch.equal(into[0], out[0].reshape(3, 4))


def run_from(leaf: Tensor, edit: Any) -> Tensor:
    y = leaf * 1
    edit(y)
    return (y.square().sum() + y.sin().sum()).sum()


class Encoder(nn.Module):
    """Gives its features, and scores that it makes of them."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.body(x).tanh()
        return h, self.head(h)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("needs", [False, True])
def test_an_output_made_of_another(needs: bool) -> None:
    """What comes back to the features through the head is no part of their dL/d(output)."""

    def seen(how: str) -> Seen:
        torch.manual_seed(0)
        model = nn.ModuleDict({"encoder": Encoder()})
        x = torch.randn(5, 3, requires_grad=needs)
        return gradients_seen(model, how, lambda: torch.cat([out.flatten() for out in model["encoder"](x * 1)]))

    safe, full = seen("safe"), seen("full")
    assert len(safe["encoder"]) == 1
    assert same(safe["encoder"][0][1], full["encoder"][0][1])
    if needs:
        assert same(safe["encoder"], full["encoder"])


def test_the_last_state_of_a_cell_that_no_one_uses() -> None:
    """The cell makes h = o tanh(c): a use of c that is its own."""

    def seen(how: str) -> Seen:
        torch.manual_seed(0)
        model = nn.ModuleDict({"cell": nn.LSTMCell(3, 4)})
        x = torch.randn(3, 2, 3, requires_grad=True)

        def run() -> Tensor:
            state = None
            for one in x * 1:
                state = model["cell"](one, state)
            return state[0]

        return gradients_seen(model, how, run)

    safe, full = seen("safe"), seen("full")
    assert safe["cell"][0][1][1] is None
    assert same([out for _, out in safe["cell"]], [out for _, out in full["cell"]])


def test_no_input_needs_a_gradient() -> None:
    """Called once when all outputs have theirs; torch's own warns."""
    module, seen = TwoOutputs(STRUCTURES["tuple"]), []
    with backward_hook(module, lambda _, into, out: seen.append((into, out))):
        a, b = module(torch.ones(2))
        (a.sum() + 2 * b.sum()).backward()
        a, b = module(torch.ones(2))
        a.sum().backward()
        assert len(seen) == 2
        layer_seen: list[Any] = []
        layer = nn.Linear(2, 2)
        with backward_hook(layer, lambda *arguments: layer_seen.append(arguments)):
            layer(torch.ones(1, 2)).sum().backward()
    assert [into for into, _ in seen] == [(None,), (None,)]
    assert [[None if g is None else g.tolist() for g in out] for _, out in seen] == [
        [[1.0] * 2, [2.0] * 2],
        [[1.0] * 2, None],
    ]
    assert len(layer_seen) == 1
    with (
        backward_hook(module, lambda _, into, out: out[:1]),
        pytest.raises(ValueError, match="a gradient for input 0, which has none"),
    ):
        module(torch.ones(2))[0].sum().backward()


def test_inputs_that_need_no_gradient_have_none() -> None:
    """Torch's own gives zeros there, a false vanishing."""
    layer, seen = nn.Bilinear(2, 3, 4), []
    with backward_hook(layer, lambda _, into, out: seen.append(into)):
        layer(torch.ones(1, 2, requires_grad=True) * 1, torch.ones(1, 3)).sum().backward()
    ((first, second),) = seen
    assert first is not None
    assert second is None


@pytest.mark.parametrize("inputs", [1, 2])
def test_a_custom_function_that_gives_its_inputs_no_gradient(inputs: int) -> None:
    class NoGradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *tensors: Tensor) -> Tensor:
            return torch.stack(tensors).sum(0)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[None, ...]:
            return (None,) * inputs

    class Module(nn.Module):
        def forward(self, *tensors: Tensor) -> Tensor:
            return NoGradient.apply(*tensors)

    module, seen = Module(), []
    with backward_hook(module, lambda _, *gradients: seen.append(gradients)):
        tensors = [torch.ones(2, requires_grad=True) * 1 for _ in range(inputs)]
        (module(*tensors).sum() + sum(tensors).sum()).backward()
    ((grad_input, grad_output),) = seen
    assert grad_input == (None,) * inputs
    assert same(grad_output, (torch.ones(2),))
    with edit(module, "(root)", grad_input=lambda g: 2 * g):
        module(*[torch.ones(2, requires_grad=True) * 1 for _ in range(inputs)]).sum().backward()


def test_attention_still_sees_that_query_key_and_value_are_one() -> None:
    """Its kernel depends on it, and with torch's own hook its numbers do."""

    def train(hooked: bool) -> dict[str, bytes]:
        torch.manual_seed(0)
        model = nn.MultiheadAttention(16, 4, dropout=0.1, batch_first=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(5):
            x = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(step), requires_grad=True)
            optimizer.zero_grad()
            with ExitStack() as stack:
                if hooked:
                    stack.enter_context(backward_hook(model, lambda _, into, out: lengths.append(len(into))))
                h = x * 1
                model(h, h, h)[0].square().sum().backward()
            optimizer.step()
        return bits(model)

    lengths: list[int] = []
    assert train(True) == train(False)
    assert lengths == [1] * 5


def test_called_once_for_each_call_and_each_backward_pass() -> None:
    layer, seen = nn.Linear(2, 2), []
    with backward_hook(layer, lambda _, into, out: seen.append(out[0].sum().item())):
        x = torch.ones(1, 2, requires_grad=True) * 1
        loss = layer(layer(layer(x)) * 1).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    assert len(seen) == 6
    assert seen[:3] == seen[3:]


@pytest.mark.parametrize("reentrant", [False, True])
def test_under_checkpointing(reentrant: bool) -> None:
    """Once per call, and the gradients are those without it."""
    torch.manual_seed(0)
    block, x = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True)), torch.randn(4, 3, requires_grad=True)

    def run(through: Callable[[Tensor], Tensor]) -> list[Any]:
        seen: list[Any] = []
        with ExitStack() as stack:
            for module in block:
                stack.enter_context(backward_hook(module, lambda m, into, out: seen.append((type(m), into, out))))
            through(through(x * 1) * 1).square().sum().backward()
        return seen

    plain = run(block)
    assert len(plain) == 4
    assert same(run(lambda h: checkpoint(block, h, use_reentrant=reentrant)), plain)
    assert hooks_on(block) == []


def test_that_a_backward_pass_is_noticed() -> None:
    """By a private function of torch; there is no public one."""
    during: list[bool] = []
    x = torch.ones(1, requires_grad=True)
    (x * 1).register_hook(lambda g: during.append(in_backward()))
    y = x * 2
    y.register_hook(lambda g: during.append(in_backward()))
    assert not in_backward()
    y.backward()
    assert during == [True]
    assert not in_backward()


def test_nodes_of_the_graph_are_numbered_in_order() -> None:
    """By private functions of torch; there are no public ones."""

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

    x = torch.ones(1, requires_grad=True)
    y = x * 1
    begun = next_node_number()
    z = Own.apply(y)
    assert number_of(y.grad_fn) < begun <= number_of(z.grad_fn) < number_of((z * 1).grad_fn)
    assert number_of(y.grad_fn.next_functions[0][0]) > next_node_number()


def test_gradients_of_gradients() -> None:
    """A penalty on the gradient: the weights' gradients are what they are without the hook."""

    def run(hooked: bool) -> list[Tensor | None]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        x = torch.randn(5, 3, requires_grad=True)
        with ExitStack() as stack:
            if hooked:
                for module in model:
                    stack.enter_context(backward_hook(module, lambda _, into, out: seen.append(out)))
            (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
            (gradient.norm() + model(x).sum()).backward()
        return [p.grad for p in model.parameters()]

    seen: list[Any] = []
    assert same(run(True), run(False))
    assert len(seen) >= 6


def test_nothing_is_kept_alive() -> None:
    module = nn.Bilinear(3, 3, 3)
    with backward_hook(module, nothing):
        a, b = torch.ones(2, 3, requires_grad=True) * 1, torch.ones(2, 3, requires_grad=True) * 1
        output = module(a, b)
        gone = [weakref.ref(tensor) for tensor in (a, b, output)]
        output.sum().backward()
        del a, b, output
        gc.collect()
        assert [ref() for ref in gone] == [None] * 3
    alive = weakref.ref(module)
    del module
    gc.collect()
    assert alive() is None


def test_removed_hooks_leave_a_graph_under_way_alone() -> None:
    """Also the tensors of a forward pass that has no backward yet."""
    layer, seen = nn.Linear(2, 2), []
    hook = backward_hook(layer, lambda *arguments: seen.append(arguments))
    output = layer(torch.ones(1, 2, requires_grad=True) * 1)
    assert output._backward_hooks
    hook.remove()
    hook.remove()
    assert not output._backward_hooks
    output.sum().backward()
    assert seen == []
    assert hooks_on(layer) == []


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt, GeneratorExit, SystemExit])
def test_hooks_are_gone_after_a_failure(error: type[BaseException]) -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise error

    model = nn.Sequential(nn.Linear(2, 2), Fails())
    for how in ("safe", "full"):
        with pytest.raises(error), backward_hook(model[0], nothing, how=how), backward_hook(model[1], nothing, how=how):
            model(torch.ones(1, 2, requires_grad=True))
        assert hooks_on(model) == []
        assert all(layer._is_full_backward_hook is None for layer in model), "torch would refuse other hooks"


def test_a_call_that_failed_does_not_confuse_the_next() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor, fail: bool) -> Tensor:
            if fail:
                raise ZeroDivisionError
            return x * 2

    module, seen = Fails(), []
    x = torch.ones(2, requires_grad=True)
    with backward_hook(module, lambda _, into, out: seen.append(into[0].tolist())):
        with pytest.raises(ZeroDivisionError):
            module(x * 1, True)
        module(x * 1, False).sum().backward()
    assert seen == [[2.0, 2.0]]


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
@pytest.mark.parametrize("how", ["safe", "full"])
def test_copies_do_nothing(duplicate: Any, how: str) -> None:
    layer, seen = nn.Linear(2, 2), []
    with backward_hook(layer, lambda *arguments: seen.append(arguments), how=how):
        duplicated = duplicate(nn.Sequential(layer))
        if duplicate is not copy.copy:
            duplicated(torch.ones(1, 2, requires_grad=True)).sum().backward()
            assert seen == []
        layer(torch.ones(1, 2, requires_grad=True)).sum().backward()
        assert len(seen) == 1


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (("layer", nothing), TypeError, "module='layer': expected a torch.nn.Module"),
        ((nn.Tanh(), 3), TypeError, "hook=3: expected a function of"),
    ],
)
def test_wrong_arguments(arguments: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        backward_hook(*arguments)


def test_a_wrong_way() -> None:
    with pytest.raises(ValueError, match="how='quick': expected one of 'safe', 'full'"):
        backward_hook(nn.Tanh(), nothing, how="quick")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, of torch.jit
def test_a_scripted_module_is_refused() -> None:
    with pytest.raises(ValueError, match="module net is a ScriptModule, on which hooks do nothing"):
        backward_hook(torch.jit.trace(nn.Tanh(), torch.ones(1)), nothing, name="net")
