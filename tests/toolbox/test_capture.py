"""capture() keeps what hand-written hooks see, as it was when it flowed, and leaves nothing behind."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import quick
import ranks
from gradwatch import backward_hook, capture
from gradwatch.toolbox import graph_uses
from gradwatch.toolbox.user_functions import EditedInPlace
from reference import bits, hooks_on
from torchvision_networks import FAMILIES, images, made
from training import quiet_trainer


def convnet() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(4 * 16, 3)
    )


def batch() -> Tensor:
    return torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(1), requires_grad=True)


def test_it_keeps_what_hand_written_hooks_see() -> None:
    """Feature maps by a forward hook, inputs by a pre-hook, gradients by torch's own full backward hook and `.grad`."""
    model, by_hand = convnet(), {}
    for name, module in model.named_children():
        seen = by_hand[name] = {}

        def before(module: nn.Module, args: Any, seen: dict = seen) -> None:
            seen["input"] = args[0].detach().clone()

        def after(module: nn.Module, args: Any, output: Tensor, seen: dict = seen) -> None:
            seen["output"] = output.detach().clone()

        def back(module: nn.Module, into: Any, out: Any, seen: dict = seen) -> None:
            seen["grad_input"], seen["grad_output"] = into[0].clone(), out[0].clone()

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)
        module.register_full_backward_hook(back)
    model(batch() * 1).square().sum().backward()

    mine = convnet()
    with capture(mine, "[0-9]") as c:
        mine(batch() * 1).square().sum().backward()
    assert list(c) == [name for name, _ in mine.named_children()]
    for name, seen in by_hand.items():
        for what, tensor in seen.items():
            (kept,) = getattr(c[name], what)
            assert torch.equal(kept, tensor), (name, what)
            assert not kept.requires_grad
        assert list(c[name].grad) == [key for key, _ in mine[int(name)].named_parameters()]
        for key, gradient in c[name].grad.items():
            assert torch.equal(gradient, model[int(name)].get_parameter(key).grad)
    assert hooks_on(mine) == []


def test_the_gradient_of_a_tensor_that_is_no_leaf() -> None:
    """The classic: d(mean of out)/dy for y = x + 2, out = 3 y^2; `y.grad` would be None."""
    y, out = nn.Identity(), nn.Identity()
    x = torch.ones(2, 2, requires_grad=True)
    with capture(nn.ModuleDict({"y": y, "out": out}), ["y", "out"]) as c:
        out(3 * y(x + 2) ** 2).mean().backward()
    assert c["y"].grad_output[0].tolist() == [[4.5, 4.5], [4.5, 4.5]]
    assert c["out"].grad_output[0].tolist() == [[0.25, 0.25], [0.25, 0.25]]


@pytest.mark.parametrize("name", quick.cases(FAMILIES, quick.NETWORKS))
def test_families_that_edit_in_place(name: str) -> None:
    """As their references that do not, at every module; the training goes on bit for bit as without it."""
    kept = {}
    for inplace in (True, False):
        model = made(name, inplace=inplace)
        torch.manual_seed(7)
        with capture(model, "*") as kept[inplace]:
            model(images(0)).square().sum().backward()
        if inplace:
            alone = made(name, inplace=True)
            torch.manual_seed(7)
            alone(images(0)).square().sum().backward()
            assert bits(alone) == bits(model)
            assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), alone.parameters(), strict=True))
    assert kept[True].keys() == kept[False].keys()
    for module, mine in kept[True].items():
        reference = kept[False][module]
        for what in ("input", "output", "grad_input", "grad_output"):
            for one, other in zip(getattr(mine, what), getattr(reference, what), strict=True):
                for a, b in zip(flat(one), flat(other), strict=True):
                    assert a is b or torch.equal(a, b), (module, what)


def flat(entry: Any) -> tuple[Any, ...]:
    return entry if isinstance(entry, tuple) else (entry,)


def test_what_is_kept_is_from_before_an_edit_in_place() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Linear(3, 1))
    x = -torch.ones(2, 3)
    with capture(model, ["0", "1"], ["input", "output"]) as c:
        model(x)
    assert torch.equal(c["0"].output[0], model[0](x))
    assert torch.equal(c["1"].input[0], model[0](x))
    assert torch.equal(c["1"].output[0], model[0](x).relu())


def test_a_view_used_before_and_after_an_edit_in_place() -> None:
    """nn.Linear gives a view where it is given three dimensions; both parts of its gradient count."""
    layer, x = nn.Linear(3, 3), torch.randn(2, 4, 3)

    def signal(*, edited: bool) -> Tensor:
        with capture(layer, "(root)", "grad_output") as c:
            y = layer(x)
            before = y + 1
            ((y.mul_(3) if edited else y * 3).square().sum() + before.sum()).backward()
        (gradient,) = c["(root)"].grad_output
        assert isinstance(gradient, Tensor)
        return gradient

    assert torch.equal(signal(edited=True), signal(edited=False))


class Twice(nn.Module):
    """Runs one layer several times, on several inputs, some by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Bilinear(2, 2, 2)
        self.pair = Pair()

    def forward(self, x: Tensor) -> Tensor:
        h = x
        for _ in range(3):
            h = self.cell(h, x)
        return self.pair(h, other=x)[0]


class Pair(nn.Module):
    def forward(self, x: Tensor, *, other: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return x * 2, {"unused": other.detach()}


def test_an_entry_for_each_call_and_tuples_of_several_tensors() -> None:
    model, x = Twice(), torch.randn(4, 2)
    with capture(model, "*") as c:
        model(x).sum().backward()
    cell, pair = c["cell"], c["pair"]
    assert len(cell.input) == len(cell.output) == len(cell.grad_input) == len(cell.grad_output) == 3
    assert [type(entry) for entry in cell.input] == [Tensor, tuple, tuple], "the first is given one tensor twice"
    assert torch.equal(cell.input[1][0], cell.output[0])
    assert cell.grad_input[0] is None, "needs no gradient"
    assert torch.equal(cell.grad_input[1][0], cell.grad_output[0]), (
        "calls are distinguished, backward goes the other way"
    )
    assert cell.grad_input[1][1] is None
    assert torch.equal(pair.input[0][1], x)
    assert [type(entry) for entry in pair.output] == [tuple]
    assert pair.grad_output[0][1] is None
    assert torch.equal(pair.grad_output[0][0], torch.ones(4, 2))
    assert list(c["(root)"].grad) == ["cell.weight", "cell.bias"]
    assert torch.equal(cell.grad["weight"], model.cell.weight.grad)


class Stages(nn.Module):
    """A backbone: the features of every stage."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

    def forward(self, x: Tensor) -> list[Tensor]:
        return [x := stage(x).tanh() for stage in self.stages]


def test_outputs_made_of_one_another() -> None:
    """dL/d(output) is what comes back from outside, whatever the module makes of its outputs itself."""

    def run(captured: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model, x = Stages(), torch.randn(4, 3)
        with capture(model, "(root)") if captured else nullcontext() as c:
            sum(n * out.sum() for n, out in enumerate(model(x), 1)).backward()
        if captured:
            assert [gradient.unique().tolist() for gradient in c["(root)"].grad_output[0]] == [[1.0], [2.0], [3.0]]
        return [p.grad for p in model.parameters()]

    assert all(map(torch.equal, run(captured=True), run(captured=False)))


class Accumulator(nn.Module):
    """Adds the scaled input to `state`, which it keeps."""

    state: Tensor | float = 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.state = 2 * x + self.state
        return self.state


def test_the_gradient_of_an_input_leaves_out_earlier_uses_of_the_same_tensor() -> None:
    """They reach the output by the module's state: of an earlier call, or computed outside."""
    x, module = torch.ones(1, requires_grad=True) * 1, Accumulator()
    module.state = 10 * x
    with capture(module, "(root)", "grad_input") as c:
        module(x)
        module(x).backward()
    assert c["(root)"].grad_input == [torch.tensor([2.0]), torch.tensor([2.0])]


def test_the_search_for_uses_of_an_input_stops_where_its_call_began(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module with a state is behind all its calls; a search to the first of them would take quadratic time."""
    numbers = []
    monkeypatch.setattr(graph_uses, "number_of", lambda node: numbers.append(node) or node._sequence_nr())
    with capture(module := Accumulator(), "(root)", "grad_input"):
        for _ in range(100):
            module(torch.ones(1, requires_grad=True) * 1)
    assert len(numbers) < 1000


def test_the_gradient_of_an_input_is_that_through_the_output() -> None:
    """What the module writes elsewhere is not found from its output; `backward_hook` has that too."""

    class Auxiliary(nn.Module):
        def forward(self, x: Tensor, losses: list[Tensor]) -> Tensor:
            losses.append(10 * x)
            return 2 * x

    def run() -> None:
        losses: list[Tensor] = []
        y = module(torch.ones(1, requires_grad=True) * 1, losses)
        (y + losses[0]).backward()

    module, seen = Auxiliary(), []
    with capture(module, "(root)", "grad_input") as c:
        run()
    with backward_hook(module, lambda _, grad_input, grad_output: seen.append(grad_input)):
        run()
    assert c["(root)"].grad_input == [torch.tensor([2.0])]
    assert seen == [(torch.tensor([12.0]),)]


def test_reduced_elsewhere_and_bounded() -> None:
    model, x = nn.Linear(2, 2), torch.ones(1, 2)
    with capture(model, "(root)", "output", reduce=torch.linalg.vector_norm, limit=2, device="cpu") as c:
        for factor in range(5):
            model(x * factor)
    expected = [torch.linalg.vector_norm(model(x * factor)) for factor in (3, 4)]
    assert torch.equal(torch.stack(c["(root)"].output), torch.stack(expected))
    with capture(model, "(root)", "output", reduce=lambda x: tuple(x.shape)) as c:
        model(x)
    assert c["(root)"].output == [(1, 2)]
    with capture(model, "(root)", "output", device="meta") as c:
        model(x)
    assert c["(root)"].output[0].is_meta


def test_a_gradient_of_several_parts_is_reduced_as_a_whole() -> None:
    class Both(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2 + x.exp() - x

    module, x = Both(), torch.zeros(4, requires_grad=True)
    with capture(module, "(root)", "grad_input", reduce=torch.linalg.vector_norm) as c:
        loss = module(x * 1).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    assert c["(root)"].grad_input == [4.0], "of each element 2, in the last pass"


@pytest.mark.parametrize("reduce", [None, torch.linalg.vector_norm])
def test_gradients_of_several_losses_at_once_are_left_out(reduce: Any) -> None:
    model, x = convnet(), batch()
    alone = torch.autograd.functional.jacobian(model, x, vectorize=True)
    with capture(model, "*", reduce=reduce) as c:
        assert torch.equal(torch.autograd.functional.jacobian(model, x, vectorize=True), alone)
        model(x).sum().backward()
    for what in ("grad_input", "grad_output"):
        first, second = getattr(c["2"], what)
        assert first is None
        assert isinstance(second, Tensor)


def test_what_is_kept_is_not_shared() -> None:
    """Not even a view that `reduce` gave."""
    model, x = nn.Linear(2, 2), torch.ones(1, 2)
    with capture(model, "(root)", ["input", "grad"], reduce=lambda x: x.view(-1)) as c:
        model(x).sum().backward()
    x.zero_()
    model.weight.grad.zero_()
    assert c["(root)"].input[0].tolist() == [1.0, 1.0]
    assert c["(root)"].grad["weight"].tolist() == [1.0] * 4


def test_gradients_of_parameters_are_as_backward_left_them() -> None:
    """Accumulated, of a frozen one none, of one thawed inside its own."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].bias.requires_grad_(False)
    x = torch.randn(3, 2)
    with capture(model, "*", "grad") as c:
        model(x).sum().backward()
        assert list(c["0"].grad) == ["weight"]
        model[0].bias.requires_grad_(True)
        model(x).sum().backward()
    assert set(c["(root)"].grad) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    for name, gradient in c["(root)"].grad.items():
        assert torch.equal(gradient, model.get_parameter(name).grad)
    assert hooks_on(model) == []


def averaged(view: bool) -> list[list[float]]:
    """The gradient of a weight that DDP has averaged, as it is and as it was captured, at each of two passes."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1, bias=False))
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=view)
    with capture(wrapped, "*", "grad") as c:
        found = []
        for _ in range(2):
            wrapped(torch.full((1, 2), 1.0 + dist.get_rank())).sum().backward()
            found += [p.grad.flatten().tolist() for p in model.parameters()]
            found += [gradient.flatten().tolist() for gradient in c["(root)"].grad.values()]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("view", [False, True])
def test_gradients_of_parameters_are_as_ddp_has_averaged_them(view: bool) -> None:
    first, second = ranks.run(averaged, view)
    assert first == second
    assert first[0:3] == first[3:6]
    assert first[6:9] == first[9:12]


def test_a_gradient_that_is_taken_away_in_the_backward_pass_is_captured() -> None:
    """As by an optimizer that steps in a hook on each parameter."""
    model = nn.Linear(2, 1)

    def take(parameter: nn.Parameter) -> None:
        parameter.grad = None

    with capture(model, "(root)", "grad") as c:
        handle = model.weight.register_post_accumulate_grad_hook(take)
        model(torch.ones(1, 2)).sum().backward()
    handle.remove()
    assert c["(root)"].grad["weight"].tolist() == [[1.0, 1.0]]


def test_gradients_of_two_contexts_at_the_same_parameters() -> None:
    model = nn.Linear(2, 1)
    with capture(model, "(root)", "grad") as outer, capture(model, "(root)", "grad") as inner:
        model(torch.ones(1, 2)).sum().backward()
    for c in (outer, inner):
        assert torch.equal(c["(root)"].grad["weight"], model.weight.grad)
    assert hooks_on(model) == []


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode: Any) -> None:
    model = convnet()
    with capture(model, "*") as c, mode():
        model(batch())
    assert c["0"].grad_output == [None]
    (kept,) = c["0"].output
    assert not kept.is_inference()
    (kept * nn.Parameter(torch.ones(1))).sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("limit", [None, 4])
def test_recomputing_a_checkpoint_is_no_call(reentrant: bool, limit: int | None) -> None:
    torch.manual_seed(0)
    block, x = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True)), torch.randn(4, 3, requires_grad=True)

    def run(through: Callable[[Tensor], Tensor]) -> Any:
        with capture(block, "*", limit=limit) as c:
            for factor in (1, 2):
                block.zero_grad()
                through(x * factor).square().sum().backward()
                block.eval()
                with torch.no_grad():
                    block(x)  # a validation
                block.train()
        return c

    plain, again = run(block), run(lambda h: checkpoint(block, h, use_reentrant=reentrant))
    for name, mine in again.items():
        for what in ("input", "output", "grad_input", "grad_output"):
            assert len(getattr(mine, what)) == 4
            for one, other in zip(getattr(mine, what), getattr(plain[name], what), strict=True):
                assert one is other is None or torch.equal(one, other), (name, what)
        assert all(torch.equal(gradient, plain[name].grad[key]) for key, gradient in mine.grad.items())


@pytest.mark.parametrize("limit", [None, 1])
def test_a_call_in_a_reentrant_checkpoint_gets_no_gradient_of_another(limit: int | None) -> None:
    """Nothing says which call is recomputed: of two micro-batches, or of a checkpoint's and one without gradients."""
    module, x = nn.Linear(2, 2), torch.ones(1, 2, requires_grad=True)

    def again(x: Tensor) -> Tensor:
        return checkpoint(module, x * 1, use_reentrant=True).sum()

    with capture(module, "(root)", limit=limit) as c:
        first, second = again(x), again(2 * x)
        first.backward()
        second.backward()
        assert set(c["(root)"].grad_output) == {None}
        again(x).backward()
        assert c["(root)"].grad_output[-1].tolist() == [[1.0, 1.0]]
        third = again(x)
        with torch.no_grad():
            module(x)
        third.backward()
        assert c["(root)"].grad_output[-1] is None
    if limit is None:
        assert [gradient is None for gradient in c["(root)"].grad_output] == [True, True, False, True, True]


def test_under_autocast() -> None:
    model = convnet()
    with capture(model, "0") as c, torch.autocast("cpu", torch.bfloat16):
        model(batch()).float().sum().backward()
    assert c["0"].output[0].dtype is c["0"].grad_output[0].dtype is torch.bfloat16
    assert c["0"].grad["weight"].dtype is torch.float32


def test_names_are_as_the_user_wrote_them() -> None:
    """Whatever wraps the model; a module used at two places has both names, the root its own."""
    inner = convnet()
    inner.add_module("again", inner[1])
    with capture(DataParallel(inner), ["0", "again", "(root)"], "output") as c:
        inner(batch())
    assert list(c) == ["(root)", "0", "again"]
    assert [len(captured.output) for captured in c.values()] == [1, 1, 2]
    with capture(inner, ["1", "again"]) as c:
        inner(batch())
    assert c["1"] is c["again"]
    assert len(c["1"].output) == 2


def test_a_compiled_model_is_refused_but_for_its_parameters() -> None:
    model = torch.compile(convnet(), backend="eager")
    with pytest.raises(ValueError, match=r"capture: module '0' is compiled, and hooks .* compiled\._orig_mod"):
        capture(model, "0")
    with capture(model, "0", "grad") as c:
        model(batch()).sum().backward()
    assert torch.equal(c["0"].grad["weight"], model.get_submodule("_orig_mod.0").weight.grad)
    with capture(model._orig_mod, "0") as c:
        model._orig_mod(batch())
    assert len(c["0"].output) == 1


def test_a_model_that_is_exported_meanwhile() -> None:
    """It has no values then, and none of the hooks is exported."""
    model, x = nn.Sequential(nn.Linear(3, 3), nn.ReLU()), torch.randn(2, 3)
    plain = torch.export.export(model, (x,), strict=False)
    with capture(model, "*") as c:
        exported = torch.export.export(model, (x,), strict=False)
        model(x)
    assert [node.target for node in exported.graph.nodes] == [node.target for node in plain.graph.nodes]
    assert [type(output) for captured in c.values() for output in captured.output] == [Tensor] * 3


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo's, of the hooks
def test_calls_inside_compiled_code() -> None:
    """Of a model that is not compiled itself: the hooks break the graph, and what they store is right."""
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), torch.randn(2, 3)
    with capture(model, "0") as plain:
        model(x).sum().backward()
    compiled = torch.compile(lambda x: model(x).sum(), backend="eager")
    with capture(model, "0") as c:
        compiled(x).backward()
    for what in ("input", "output", "grad_output"):
        assert torch.equal(*getattr(c["0"], what), *getattr(plain["0"], what))


@pytest.mark.usefixtures("quiet")
def test_inside_a_fit() -> None:
    """A LightningModule captures in its own training step; its training is that of a module that does not."""
    from torch.utils.data import DataLoader

    import lightning as L

    class Net(L.LightningModule):
        def __init__(self, watched: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net, self.watched, self.norms = convnet(), watched, []

        def training_step(self, x: Tensor, index: int) -> Tensor:
            return self.net(x).square().mean()

        def on_train_batch_start(self, *_: Any) -> None:
            if self.watched:
                self.capture = capture(self, "net.[02]", reduce=torch.linalg.vector_norm)
                self.capture.__enter__()

        def on_train_batch_end(self, *_: Any) -> None:
            if self.watched:
                self.capture.__exit__()
                kept = self.capture["net.0"]
                self.norms.append([*kept.output, *kept.grad_output, *kept.grad.values()])

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    nets = {}
    for watched in (True, False):
        net = nets[watched] = Net(watched)
        trainer = quiet_trainer()
        trainer.fit(net, DataLoader([torch.ones(1, 8, 8) * i for i in range(8)], batch_size=2))
    assert [len(norms) for norms in nets[True].norms] == [4] * 4
    assert bits(nets[True]) == bits(nets[False])
    assert hooks_on(nets[True]) == []


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_hooks_are_gone_on_every_way_out(error: type[BaseException]) -> None:
    model = convnet()

    def fails(x: Tensor) -> Tensor:
        raise error

    with pytest.raises(error), capture(model, "*"):
        fails(model(batch()))
    assert hooks_on(model) == []
    with pytest.raises(error), capture(model, "*", "output", reduce=fails):
        model(batch())
    assert hooks_on(model) == []
    with pytest.raises(error), capture(model, "*", ["grad", "grad_output"], reduce=fails):
        model(batch()).sum().backward()
    assert hooks_on(model) == []


def test_contexts_nest_and_generators_close() -> None:
    model = convnet()

    def steps() -> Iterator[int]:
        with capture(model, "0") as c:
            while True:
                model(batch())
                yield len(c["0"].output)

    with capture(model, "*") as outer:
        running = steps()
        assert [next(running), next(running)] == [1, 2]
        running.close()
        with pytest.raises(RuntimeError, match="entered already"), outer:
            pass
        model(batch())
    assert len(outer["0"].output) == 3
    assert hooks_on(model) == []
    with outer:
        assert outer["0"].output == []


def test_an_attachment_that_fails_half_way_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = convnet()

    def fails(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(model[2].weight, "register_post_accumulate_grad_hook", fails, raising=False)
    with pytest.raises(ZeroDivisionError), capture(model, "[0-9]"):
        pass
    assert hooks_on(model) == []


def test_a_backward_pass_after_the_context_is_not_captured() -> None:
    model = convnet()
    with capture(model, "0") as c:
        loss = model(batch()).sum()
    loss.backward()
    assert c["0"].grad_output == c["0"].grad_input == [None]
    assert c["0"].grad == {}


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_the_model_captures_nothing(duplicate: Any) -> None:
    model = convnet()
    with capture(model, "*", "output") as c:
        duplicated = duplicate(model)
        duplicated(batch()).sum().backward()
        assert all(len(captured.output) == 0 for captured in c.values())


def test_nothing_is_kept_alive() -> None:
    """Neither the graph, nor the activations, nor the model."""
    model = convnet()
    with capture(model, "*", reduce=torch.linalg.vector_norm) as c:
        hidden = model[0](batch())
        gone = weakref.ref(hidden)
        hidden.sum().backward()
        del hidden
        gc.collect()
        assert gone() is None
    alive = weakref.ref(model)
    del model, c
    gc.collect()
    assert alive() is None


def test_handles_of_tensors_that_are_gone_are_forgotten() -> None:
    model = nn.Linear(2, 2)
    with capture(model, "(root)", "grad_output", limit=1) as c:
        assert c._hooks is not None
        for _ in range(500):
            model(torch.ones(1, 2)).sum().backward()
        assert sum(len(h._handles) for h in c._hooks._handles if type(h).__name__ == "Flowing") < 100


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (("layer",), ValueError, "the pattern 'layer' matches no module; the nearest names are"),
        (("(rot)",), ValueError, r"the nearest names are \(root\)"),
        ((3,), TypeError, "patterns=3: expected a shell pattern"),
        (([],), ValueError, r"patterns=\[\]: empty"),
        (("*", "outputs"), ValueError, "what='outputs': expected one or several of input, output, grad_input"),
        (("*", ()), ValueError, r"what=\(\): expected one or several"),
    ],
)
def test_wrong_arguments(arguments: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=f"capture: .*{words}"):
        capture(convnet(), *arguments)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"limit": 0}, ValueError, "limit=0: expected a number of calls of at least 1"),
        ({"limit": True}, TypeError, "limit=True"),
        ({"device": "gpu"}, ValueError, "device='gpu': expected a torch.device"),
        ({"device": "cuda:99"}, ValueError, "device='cuda:99': expected a torch.device that is there"),
        ({"reduce": 3}, TypeError, "reduce=3: expected a function of one tensor"),
        (
            {"reduce": lambda a, b: a},
            TypeError,
            r"reduce=.* expected a function of one tensor.* its arguments are \(a, b\)",
        ),
    ],
)
def test_wrong_options(options: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=f"capture: {words}"):
        capture(convnet(), "*", **options)


def test_gradients_of_lazy_parameters_are_refused_until_they_have_a_shape() -> None:
    model = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(ValueError, match=r"capture: grad: weight of module '0' has no shape yet; run the model once"):
        capture(model, "0")
    with capture(model, "*", "output"):
        model(torch.ones(2, 4))
    with capture(model, "0") as c:
        model(torch.ones(2, 4)).sum().backward()
    assert c["0"].grad["weight"].shape == (3, 4)


def test_a_name_with_brackets_is_written_with_brackets() -> None:
    model = nn.Sequential()
    model.add_module("conv[0]", nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"glob.escape: 'conv\[\[\]0\]'"):
        capture(model, "!conv[0]")
    assert list(capture(model, "conv[[]0]")) == ["conv[0]"]


def test_no_model() -> None:
    with pytest.raises(TypeError, match="capture: model=3: expected a torch"):
        capture(3, "*")  # type: ignore[arg-type]


def test_what_was_not_asked_for_and_who_was_not_named() -> None:
    with capture(convnet(), "0", "output") as c:
        pass
    with pytest.raises(ValueError, match="'grad_input' of module '0' was not captured; add it to what='grad_input'"):
        _ = c["0"].grad_input
    with pytest.raises(KeyError, match="no module '1' is captured; the nearest names are 0"):
        _ = c["1"]


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_a_reduction_in_place_is_an_error_that_names_the_module(mode: Any) -> None:
    model = convnet()
    with (
        mode(),
        pytest.raises(EditedInPlace, match="reduce, for output of module '0', edits its tensor in place"),
        capture(model, "0", "output", reduce=lambda x: x.zero_()),
    ):
        model(batch())
