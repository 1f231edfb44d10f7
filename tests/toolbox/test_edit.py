"""edit() changes what flows as hand-written hooks do, holds functions to their word, and leaves nothing behind."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections import OrderedDict, namedtuple
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import quick
from gradwatch import capture, edit
from gradwatch.hooks.hook_set import tensors_in
from gradwatch.toolbox.nested_tensors import map_tensors
from gradwatch.toolbox.user_functions import EditedInPlace
from models import module_of
from reference import bits, hooks_on
from torchvision_networks import FAMILIES, images, made
from training import quiet_trainer


class Product(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a * b


def test_two_more_on_the_gradient_of_a_product() -> None:
    """The classic: 7 x 13 with `grad + 2` on the product gives 3 x 13 and 3 x 7."""
    a, b = torch.tensor(7.0, requires_grad=True), torch.tensor(13.0, requires_grad=True)
    product = Product()
    with edit(product, "(root)", grad_output=lambda g: g + 2):
        product(a, b).backward()
    assert (a.grad, b.grad) == (39.0, 21.0)


def layer() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    x = x.clone().requires_grad_()
    model(x * 1).square().sum().backward()
    return [x.grad, *(p.grad.clone() for p in model.parameters())]


BY_HAND = {
    "input": lambda m, f: m.register_forward_pre_hook(lambda _, args: (f(args[0]),)),
    "output": lambda m, f: m.register_forward_hook(lambda _, args, out: f(out)),
    "grad_input": lambda m, f: m.register_full_backward_hook(lambda _, into, out: (f(into[0]),)),
    "grad_output": lambda m, f: m.register_full_backward_pre_hook(lambda _, out: (f(out[0]),)),
    "grad": lambda m, f: [p.register_hook(f) for p in m.parameters()],
}


@pytest.mark.parametrize("what", BY_HAND)
@pytest.mark.parametrize("where", ["0", "1", "2"])
@pytest.mark.parametrize("f", [lambda x: x / 2, lambda x: -x, lambda x: x * 0, lambda x: x.clamp(-0.1, 0.1)])
def test_as_by_hand(what: str, where: str, f: Any) -> None:
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))
    model, by_hand = layer(), layer()
    BY_HAND[what](by_hand.get_submodule(where), f)
    with edit(model, where, **{what: f}):
        mine = gradients(model, x)
    assert all(map(torch.equal, mine, gradients(by_hand, x)))
    assert hooks_on(model) == []
    assert all(map(torch.equal, gradients(model, x), gradients(layer(), x))), "the edit is over"


def test_manifold_mixup_mixes_and_gradients_flow_through_both() -> None:
    model, x = layer(), torch.randn(4, 3)
    order, share = torch.tensor([2, 0, 3, 1]), 0.3
    with edit(model, "1", output=lambda h: share * h + (1 - share) * h[order]):
        mixed = model(x)
    h = model[1](model[0](x))
    expected = model[2](share * h + (1 - share) * h[order])
    assert torch.equal(mixed, expected)
    weights = list(model.parameters())
    assert all(
        map(torch.equal, torch.autograd.grad(mixed.sum(), weights), torch.autograd.grad(expected.sum(), weights))
    )


@pytest.mark.parametrize("what", ["input", "output", "grad_input", "grad_output", "grad"])
@pytest.mark.parametrize("name", quick.cases(FAMILIES, quick.NETWORKS))
def test_on_families_that_edit_in_place(name: str, what: str) -> None:
    """At every module; as on the reference that edits nothing in place."""

    def run(*, inplace: bool) -> list[Tensor]:
        model = made(name, inplace=inplace)
        torch.manual_seed(7)
        with edit(model, ["*", "!(root)"], **{what: lambda t: t * 0.9}):
            x = images(0)
            out = model(x * 1)
            out.square().sum().backward()
        return [out, x.grad, *(p.grad for p in model.parameters())]

    assert all(map(torch.equal, run(inplace=True), run(inplace=False)))


@pytest.mark.parametrize("name", quick.cases(FAMILIES, quick.NETWORKS))
def test_what_changes_nothing_changes_no_bit(name: str) -> None:
    same = dict.fromkeys(["input", "output", "grad_input", "grad_output", "grad"], lambda t: t)

    def train(edited: bool) -> dict[str, bytes]:
        model = made(name, inplace=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(2):
            optimizer.zero_grad()
            torch.manual_seed(step)
            if edited:
                with edit(model, "*", **same):
                    model(images(step)).square().sum().backward()
            else:
                model(images(step)).square().sum().backward()
            optimizer.step()
        return bits(model)

    assert train(True) == train(False)


class Many(nn.Module):
    """Two tensors, a mask and a number, by position and keyword; gives a dict."""

    def forward(self, pair: tuple[Tensor, Tensor], *, mask: Tensor, times: int) -> dict[str, Any]:
        a, b = pair
        return {"sum": (a + b) * mask * times, "mask": mask, "same": a is b}


def test_of_several_tensors_each_is_mapped_once() -> None:
    module, mask = Many(), torch.tensor([True, False])
    a, b = torch.ones(2), torch.full((2,), 2.0)
    calls: list[Tensor] = []

    def double(x: Tensor) -> Tensor:
        calls.append(x)
        return x * 2

    with edit(module, "(root)", input=double):
        assert module((a, b), mask=mask, times=1)["sum"].tolist() == [6.0, 0.0]
        assert len(calls) == 2
        assert module((a, a), mask=mask, times=1)["same"]
        assert len(calls) == 3
    with edit(module, "(root)", output=double):
        out = module((a, b), mask=mask, times=2)
    assert out["sum"].tolist() == [12.0, 0.0]
    assert out["mask"] is mask


def test_a_dict_whose_items_are_its_attributes_keeps_both() -> None:
    class Items(dict):  # type: ignore[type-arg]
        def __init__(self, **items: Tensor) -> None:
            super().__init__(**items)
            self.__dict__ = self

    class Module(nn.Module):
        def forward(self, x: Tensor) -> Items:
            return Items(y=x)

    module = Module()
    with edit(module, "(root)", output=lambda x: 2 * x):
        made = module(torch.ones(2))
    assert made.y is made["y"]
    assert made.y.tolist() == [2.0, 2.0]


def test_integers_are_edited_where_there_is_nothing_else() -> None:
    embedding, ids = nn.Embedding(4, 2), torch.tensor([0, 1])
    with edit(embedding, "(root)", input=lambda i: i + 2):
        assert torch.equal(embedding(ids), embedding.weight[2:])


def test_a_parameter_in_several_modules_is_edited_once() -> None:
    model, x = layer(), torch.randn(2, 3)
    plain = gradients(model, x)
    with edit(model, "*", grad=lambda g: 2 * g):
        doubled = gradients(model, x)
    assert torch.equal(doubled[0], plain[0])
    assert all(torch.equal(two, 2 * one) for two, one in zip(doubled[1:], plain[1:], strict=True))


def test_reversed_gradients() -> None:
    """Gradient reversal (Ganin et al. 2016) in a line: the features unlearn what the head learns."""
    model, x = layer(), torch.randn(2, 3)
    plain = gradients(model, x)
    with edit(model, "2", grad_input=torch.neg):
        reversed_ = gradients(model, x)
    assert all(map(torch.equal, reversed_[3:], plain[3:]))
    assert all(torch.equal(one, -two) for one, two in zip(reversed_[:3], plain[:3], strict=True))


class Chain(nn.Module):
    """Gives a list or tuple of outputs, of which later ones are made of earlier ones."""

    def __init__(self, then: Any) -> None:
        super().__init__()
        self.first, self.second, self.then = nn.Linear(4, 4), nn.Linear(4, 4), then

    def forward(self, x: Tensor) -> Any:
        return self.then(self.first(x), self.second)


CHAINS = {
    "pair": lambda h, f: (h, f(h)),
    "pyramid": lambda h, f: [h.tanh(), (g := f(h.tanh())), g + h],
    "dict": lambda h, f: {"all": [h, h.relu()], "out": f(h.relu())},
    "a view": lambda h, f: (h, h.view(-1)),
    "parts": lambda h, f: (h[:1], f(h[1:])),
    "a view of what is edited": lambda h, f: (h.mul_(2), h.view(-1), f(h)),
}


@pytest.mark.parametrize("name", CHAINS)
def test_outputs_made_of_one_another(name: str) -> None:
    """What a module does with its own outputs is before them: twice every dL/d(output) is twice every gradient."""

    def run(f: Any) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), Chain(CHAINS[name]))
        x = torch.randn(3, 4, requires_grad=True)
        with edit(model, "1", grad_output=f):
            sum((n * out).sin().sum() for n, out in enumerate(tensors_in(model(x)), 1)).backward()
        return [x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]

    plain = run(lambda g: g)
    assert len(plain) >= 5
    assert all(torch.equal(two, 2 * one) for two, one in zip(run(lambda g: 2 * g), plain, strict=True))


@pytest.mark.parametrize("name", CHAINS)
def test_outputs_made_of_one_another_may_be_edited_in_place_later(name: str) -> None:
    def run(edited: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = Chain(lambda h, f: CHAINS[name](h, lambda g: g + f.bias))
        x = torch.randn(3, 4, requires_grad=True)
        with edit(model, "(root)", grad_output=lambda g: g) if edited else nullcontext():
            out = list(tensors_in(model(x * 1)))
        out[-1].mul_(3)
        sum((n * one).sin().sum() for n, one in enumerate(out, 1)).backward()
        return [x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]

    torch.testing.assert_close(run(True), run(False))


@pytest.mark.parametrize("reentrant", [False, True])
def test_under_checkpointing(reentrant: bool) -> None:
    model, x = layer(), torch.randn(4, 3)

    def run(through: Any) -> list[Tensor]:
        model.zero_grad()
        leaf = x.clone().requires_grad_()
        with edit(model, "1", input=lambda h: h / 2, grad_output=lambda g: 3 * g, grad_input=lambda g: g + 1):
            through(leaf * 1).square().sum().backward()
        return [leaf.grad, *(p.grad for p in model.parameters())]

    assert all(map(torch.equal, run(lambda h: checkpoint(model, h, use_reentrant=reentrant)), run(model)))


@pytest.mark.parametrize(
    "transform", [torch.func.grad, torch.func.jacrev, lambda f: torch.func.vmap(torch.func.grad(f))]
)
@pytest.mark.parametrize("what", ["grad_input", "grad_output"])
def test_views_inside_torch_func(what: str, transform: Any) -> None:
    module, x = nn.Flatten(0), torch.randn(2, 3)

    def gradient(f: Any) -> Tensor:
        with edit(module, "(root)", **{what: f}):
            return transform(lambda x: module(x * 1).sin().sum())(x)

    assert torch.equal(gradient(lambda g: 2 * g), 2 * gradient(lambda g: g))


def test_capture_sees_the_edits_of_the_contexts_around_it() -> None:
    model, x = layer(), torch.randn(2, 3)
    with edit(model, "1", output=torch.zeros_like), capture(model, "[12]", "output") as c:
        model(x)
    assert not c["1"].output[0].any()
    assert torch.equal(c["2"].output[0], model[2].bias.expand(2, 2))


WRONG = {
    "in place": (lambda t: t.mul_(2), EditedInPlace, "edits its tensor in place, .* return a new one"),
    "through a view": (lambda t: t.view(-1).clamp_(0) is None or t, EditedInPlace, "edits its tensor in place"),
    "nothing": (lambda t: None, TypeError, "returned NoneType: expected a tensor"),
    "shape": (
        lambda t: t[:1],
        ValueError,
        r"was given \[.*\] float32 on cpu and returned \[1.*expected the same shape",
    ),
    "dtype": (lambda t: t.double(), ValueError, "returned .* float64 on cpu: expected the same shape, dtype"),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("what", BY_HAND)
def test_functions_that_break_their_word(what: str, wrong: str) -> None:
    f, error, words = WRONG[wrong]
    model = layer()
    with pytest.raises(error, match=f"edit: .*{what}.* module '2'.*{words}"), edit(model, "2", **{what: f}):
        model(torch.randn(4, 3, requires_grad=True)).square().sum().backward()
    assert hooks_on(model) == []


@pytest.mark.parametrize("what", ["input", "output"])
def test_in_inference_mode_too(what: str) -> None:
    """Where tensors do not count their edits."""
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), torch.ones(2, 3)
    with torch.inference_mode():
        expected = model[1](model[0](x) / 2) if what == "input" else model(x) / 2
        with edit(model, "1", **{what: lambda t: t / 2}):
            assert torch.equal(model(x), expected)
        with edit(model, "1", **{what: lambda t: t}):
            same = model(x)
        assert torch.equal(same, model(x))
        with (
            pytest.raises(EditedInPlace, match="'1' edits its tensor in place"),
            edit(model, "1", **{what: lambda t: t.mul_(2)}),
        ):
            model(x)
    assert hooks_on(model) == []


def test_an_edit_in_place_that_torch_itself_forbids() -> None:
    """A gradient whose elements are one in memory, and a leaf."""
    model = nn.Linear(3, 2)
    with (
        pytest.raises(EditedInPlace, match=r"grad_output= for module .* in place"),
        edit(model, "*", grad_output=lambda g: g.mul_(2)),
    ):
        model(torch.ones(1, 3)).sum().backward()
    with pytest.raises(EditedInPlace, match="input= for module"), edit(model, "*", input=lambda x: x.mul_(2)):
        model(torch.ones(1, 3, requires_grad=True))


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
@pytest.mark.parametrize("what", BY_HAND)
def test_what_a_function_raises_passes_and_no_hook_stays(what: str, error: type[BaseException]) -> None:
    def fails(x: Tensor) -> Tensor:
        raise error

    model = layer()
    with pytest.raises(error), edit(model, "*", **{what: fails}):
        model(torch.randn(2, 3, requires_grad=True)).sum().backward()
    assert hooks_on(model) == []


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_the_model_is_not_edited(duplicate: Any) -> None:
    model, x = layer(), torch.randn(2, 3)
    plain = gradients(model, x)
    model.zero_grad(set_to_none=True)
    with edit(model, "*", **dict.fromkeys(["input", "output", "grad_input", "grad_output"], torch.zeros_like)):
        duplicated = duplicate(model)
        assert all(map(torch.equal, gradients(duplicated, x), plain))


def test_the_same_edit_may_be_entered_again_but_not_within_itself() -> None:
    model = layer()
    halves = edit(model, "0", input=lambda x: x / 2)
    for _ in range(2):
        with halves, pytest.raises(RuntimeError, match="entered already"):
            halves.__enter__()
    assert hooks_on(model) == []


@pytest.mark.parametrize(
    ("patterns", "functions", "error", "words"),
    [
        ("0", {}, ValueError, "nothing to do: expected one or several of input, output, grad_input, grad_output, grad"),
        ("0", {"input": 2}, TypeError, "input=2: expected a function of one tensor, such as lambda x: x / 2"),
        ("0", {"grad": lambda: 1}, TypeError, r"grad=<.*expected a function of one tensor.*its arguments are \(\)"),
        ("0", {"grad": lambda a, b: 1}, TypeError, r"its arguments are \(a, b\)"),
        ("9", {"grad": torch.neg}, ValueError, "the pattern '9' matches no module; the nearest names are"),
        ("!", {"grad": torch.neg}, ValueError, "patterns='!': empty"),
    ],
)
def test_wrong_arguments(patterns: Any, functions: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=f"edit: .*{words}"):
        edit(layer(), patterns, **functions)


def test_gradients_of_lazy_parameters_are_refused_until_they_have_a_shape() -> None:
    model = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(ValueError, match=r"edit: grad: weight of module '0' has no shape yet; run the model once"):
        edit(model, "0", grad=torch.zeros_like)
    with edit(model, "*", output=torch.neg):
        model(torch.ones(2, 4))
    with edit(model, "0", grad=torch.zeros_like):
        model(torch.ones(2, 4)).sum().backward()
    assert not model[0].weight.grad.any()


def test_a_compiled_model_is_refused_but_for_its_parameters() -> None:
    model, x = torch.compile(layer(), backend="eager"), torch.randn(2, 3)
    with pytest.raises(ValueError, match=r"edit: module '0' is compiled"):
        edit(model, "0", input=lambda x: x)
    with edit(model, "0", grad=torch.zeros_like):
        model(x).square().sum().backward()
    weight, bias, *rest = (p.grad for p in model.parameters())
    assert not weight.any()
    assert not bias.any()
    assert all(gradient.any() for gradient in rest)


@pytest.mark.usefixtures("quiet")
def test_inside_a_fit() -> None:
    """A layer whose gradient is zeroed for a whole fit stays what it was; the others learn."""
    from lightning.pytorch.demos.boring_classes import RandomDataset
    from torch.utils.data import DataLoader

    net = nn.Sequential(nn.Linear(32, 8), nn.Tanh(), nn.Linear(8, 1))
    model = module_of(net, lambda net, batch, index: net(batch).square().mean(), lr=0.1)
    before = copy.deepcopy(model)
    trainer = quiet_trainer()
    with edit(model, "net.0", grad=torch.zeros_like):
        trainer.fit(model, DataLoader(RandomDataset(32, 8), batch_size=2))
    assert bits(model.net[0]) == bits(before.net[0])
    assert bits(model.net[2]) != bits(before.net[2])
    assert hooks_on(model) == []


# ---- tensors in nests

Point = namedtuple("Point", "x y")


@dataclass(frozen=True)
class Frozen:
    x: Any
    label: str = "a"
    late: Any = field(init=False, default=None)


class Pair(tuple[Any, Any]):
    """A tuple whose arguments are not one list."""

    def __new__(cls, first: Any, second: Any) -> Pair:
        made = super().__new__(cls, (first, second))
        made.label = "of features"
        return made


class Levels(list[Any]):
    def __init__(self, *levels: Any) -> None:
        super().__init__(levels)


def one() -> Tensor:
    return torch.ones(1)


class GivesText(nn.Module):
    """A module that gives a word, or a tensor and one."""

    def __init__(self, *, alone: bool) -> None:
        super().__init__()
        self.alone = alone

    def forward(self, x: Tensor) -> object:
        return "a word" if self.alone else ("a word", x)


@pytest.mark.parametrize("what", ["output", "grad_output"])
def test_where_there_is_no_tensor_to_change_it_is_said(what: str) -> None:
    """Once, at the end; not where another module has one, where no module is called, or beside an error."""
    silent, telling = GivesText(alone=True), GivesText(alone=False)
    model = nn.ModuleDict({"silent": silent, "telling": telling})
    change = {what: lambda x: 2 * x}
    words = rf"edit: {what}= changed nothing: module 'silent' .* in its output"
    with pytest.warns(UserWarning, match=words) as said, edit(model, "silent", **change):
        silent(one()), silent(one())
    assert len(said) == 1
    assert said[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with edit(model, ["silent", "telling"], **change):
            silent(one()), telling(one())
        with edit(model, "silent", **change):
            pass
        with pytest.raises(ZeroDivisionError), edit(model, "silent", **change):
            1 / len(silent(one())[:0])


@pytest.mark.parametrize(
    "nest",
    [
        (one(), 3, None),
        [one(), [one()]],
        Point(one(), "text"),
        Pair(one(), "text"),
        Levels(one(), "text"),
        OrderedDict(b=one(), a=2),
        Frozen({"deep": (one(), Frozen(one()))}),
        torch.max(torch.ones(2, 2), 0),
        MappingProxyType({"a": one()}),
    ],
    ids=lambda nest: type(nest).__name__,
)
def test_nests_keep_their_kind(nest: Any) -> None:
    new = map_tensors(nest, torch.clone)
    kind = dict if isinstance(nest, MappingProxyType) else type(nest)
    assert type(new) is kind
    assert new is not nest
    assert repr(new) == repr(dict(nest) if kind is dict else nest)
    assert getattr(new, "label", None) == getattr(nest, "label", None)
    assert map_tensors(nest, lambda t: t) is nest


@given(
    st.recursive(
        st.one_of(st.none(), st.integers(), st.just("tensor")),
        lambda inner: st.one_of(
            st.lists(inner, max_size=4),
            st.lists(inner, max_size=4).map(tuple),
            st.dictionaries(st.text(max_size=2), inner, max_size=4),
        ),
        max_leaves=15,
    )
)
def test_tensors_are_met_in_the_order_in_which_they_are_listed(nest: Any) -> None:
    made_of = map_strings(nest)
    met: list[Tensor] = []
    map_tensors(made_of, lambda t: met.append(t) or t)
    assert [id(t) for t in met] == [id(t) for t in tensors_in(made_of)]


def map_strings(value: Any) -> Any:
    if value == "tensor":
        return torch.zeros(1)
    if isinstance(value, dict):
        return {key: map_strings(item) for key, item in value.items()}
    return type(value)(map(map_strings, value)) if isinstance(value, list | tuple) else value


def test_a_models_own_output_class() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")
    nest = outputs.BaseModelOutput(last_hidden_state=one(), hidden_states=(one(), one()))
    new = map_tensors(nest, lambda t: t * 2)
    assert type(new) is type(nest)
    assert new.last_hidden_state.item() == new["last_hidden_state"].item() == 2.0
    assert [t.item() for t in new.hidden_states] == [2.0, 2.0]
    assert nest.last_hidden_state.item() == 1.0
