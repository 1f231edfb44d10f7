"""Which modules are layers, what they are called, and what patterns choose them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from gradwatch import Watch
from gradwatch.core.record import ROOT, clean_name
from gradwatch.measure.layers import check_patterns, find_layers, is_lazy, layout_of, libraries_of, structure_of


def encoder() -> nn.Module:
    model = nn.Module()
    model.encoder = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.LayerNorm(2)) for _ in range(3))
    model.head = nn.Linear(2, 1)
    return model


def chosen(model: nn.Module, *patterns: str) -> list[str]:
    return [layer.name for layer in find_layers(model, patterns or ("*",))]


ALL = ["encoder.0.0", "encoder.0.2", "encoder.1.0", "encoder.1.2", "encoder.2.0", "encoder.2.2", "head"]


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (("*",), ALL),
        (("encoder.*",), ALL[:-1]),
        (("*.0",), ["encoder.0.0", "encoder.1.0", "encoder.2.0"]),
        (("head",), ["head"]),
        (("*", "!head"), ALL[:-1]),
        (("!head",), ALL[:-1]),
        (("!encoder.*", "encoder.1.?"), ["encoder.1.0", "encoder.1.2", "head"]),
        (("encoder.*", "!encoder.[12].*"), ALL[:2]),
        (("encoder.*", "!encoder.*", "encoder.0.0"), ["encoder.0.0"]),
    ],
)
def test_patterns(patterns: tuple[str, ...], expected: list[str]) -> None:
    """In model order; later patterns win; '!' takes away."""
    assert chosen(encoder(), *patterns) == expected


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("haed", "layers: the pattern 'haed' matches no layer; the nearest names are head"),
        ("encoder.7.0", "layers: the pattern 'encoder.7.0' matches no layer; the nearest names are encoder."),
        ("decoder.*", "layers: the pattern 'decoder.*' matches no layer; the nearest names are encoder."),
        ("encoder", "'encoder' owns no parameters itself; for the layers inside it write 'encoder.*'"),
        ("!encoder.1", "'encoder.1' owns no parameters itself; for the layers inside it write 'encoder.1.*'"),
        ("Head", "layers: the pattern 'Head' matches no layer; the nearest names are head"),
        ("xyzzy", "layers: the pattern 'xyzzy' matches no layer; the nearest names are encoder.0.0, encoder.0.2"),
    ],
)
def test_patterns_that_match_nothing_name_what_would(pattern: str, message: str) -> None:
    with pytest.raises(ValueError, match="matches no layer") as error:
        chosen(encoder(), "*", pattern)
    assert message in str(error.value)


@pytest.mark.parametrize("wrong", [3, 3.5, [1, 2], ["head", None], {"head": 1}, nn.Linear(1, 1), True])
def test_wrong_types_of_patterns(wrong: object) -> None:
    with pytest.raises(TypeError, match=r"layers=.*expected None, a shell pattern such as 'encoder\.\*' or a list"):
        check_patterns(wrong)


@pytest.mark.parametrize("empty", ["", "!", [], (), ["head", ""], ["!"]])
def test_empty_patterns(empty: object) -> None:
    with pytest.raises(ValueError, match=r"layers=.*empty; expected a shell pattern"):
        check_patterns(empty)


def test_good_patterns() -> None:
    assert check_patterns(None) == ("*",)
    assert check_patterns("head") == ("head",)
    assert check_patterns(["*", "!head"]) == ("*", "!head")


@pytest.mark.parametrize(
    ("raw", "clean"),
    [
        ("encoder.0.weight", "encoder.0.weight"),
        ("_orig_mod.encoder.weight", "encoder.weight"),
        ("encoder._fsdp_wrapped_module.0._checkpoint_wrapped_module.weight", "encoder.0.weight"),
        ("layer.parametrizations.weight.original0", "layer.weight.original0"),
        ("module.weight", "module.weight"),
        ("", ""),
    ],
)
def test_clean_names(raw: str, clean: str) -> None:
    assert clean_name(raw) == clean


def test_a_site_is_found_by_the_name_that_torch_gives_it() -> None:
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)), nn.Linear(2, 1))
    layout = layout_of(find_layers(model))
    for name, _ in model.named_parameters():
        assert layout.sites[layout.find(name)].name == clean_name(name)
        assert layout.find(f"_orig_mod.{name}") == layout.find(name)
    assert layout.find("_orig_mod.1") == layout.find("1")
    with pytest.raises(KeyError, match="no site named"):
        layout.find("_orig_mod.2")


@given(st.lists(st.sampled_from(["a", "0", "weight", "_orig_mod", "_checkpoint_wrapped_module"]), max_size=6))
def test_cleaning_twice_is_cleaning_once(parts: list[str]) -> None:
    name = ".".join(parts)
    assert clean_name(clean_name(name)) == clean_name(name)


def test_tied_weights_belong_to_their_first_layer() -> None:
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5))
    model[1].weight = model[0].weight
    layers = find_layers(model)
    assert {layer.name: [name for name, _ in layer.parameters] for layer in layers} == {
        "0": ["0.weight"],
        "1": ["1.bias"],
    }


def test_a_module_at_two_places_is_one_layer() -> None:
    shared = nn.Linear(2, 2)
    assert chosen(nn.Sequential(shared, nn.ReLU(), shared)) == ["0"]


def test_parameters_of_the_model_itself() -> None:
    model = encoder()
    model.scale = nn.Parameter(torch.ones(1))
    layers = find_layers(model)
    assert layers[0].name == ROOT
    assert [name for name, _ in layers[0].parameters] == ["scale"]
    assert chosen(nn.Linear(2, 2)) == [ROOT]


def test_parametrized_weights_belong_to_the_module_that_has_them() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight * self.scale

    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(2, 2)), nn.Linear(2, 2))
    parametrize.register_parametrization(model[1], "bias", Scaled())
    layers = find_layers(model)
    assert [layer.name for layer in layers] == ["0", "1"]
    assert [layer.module for layer in layers] == [model[0], model[1]]
    assert [name for name, _ in layers[0].parameters] == ["0.bias", "0.weight.original0", "0.weight.original1"]
    assert sorted(name for name, _ in layers[1].parameters) == ["1.bias.0.scale", "1.bias.original", "1.weight"]


def test_wrapped_models_have_the_names_of_the_bare_one() -> None:
    assert chosen(nn.DataParallel(encoder())) == ALL
    assert chosen(torch.compile(encoder(), backend="eager")) == ALL  # type: ignore[arg-type]


def test_a_module_called_module_keeps_its_name() -> None:
    model = nn.Module()
    model.module = nn.Linear(2, 2)
    assert chosen(model) == ["module"]


def test_parameters_that_a_module_holds_for_others() -> None:
    """As the `TensorDictParams` of torchrl's losses, which run a network functionally."""
    held, net = nn.Module(), nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    held._parameters.update(net.named_parameters())
    model = nn.ModuleDict({"loss": held, "head": nn.Linear(2, 1)})
    layers = find_layers(model)
    assert [(layer.name, layer.hookable) for layer in layers] == [("loss.0", False), ("loss.2", False), ("head", True)]
    names = [name for layer in layers for name, _ in layer.parameters]
    assert names == [name for name, _ in model.named_parameters()]
    assert [layer.name for layer in find_layers(held)] == ["0", "2"]


def test_compiled_and_scripted_regions_take_no_module_hooks() -> None:
    model = encoder()
    model.encoder[1].compile(backend="eager")
    assert [layer.name for layer in find_layers(model) if not layer.hookable] == ["encoder.1.0", "encoder.1.2"]
    whole = torch.compile(encoder(), backend="eager")
    assert not any(layer.hookable for layer in find_layers(whole))  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripted_modules_take_no_module_hooks() -> None:
    model = nn.Sequential(nn.Linear(2, 2), torch.jit.script(nn.Linear(2, 2)))
    assert [layer.hookable for layer in find_layers(model)] == [True, False]


def test_a_model_without_parameters_has_no_layers() -> None:
    assert find_layers(nn.ReLU()) == []
    assert find_layers(nn.ReLU(), ("encoder.*",)) == []


def test_modules_of_installed_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's modules are parts of the class that makes them; a class derived from a library's is the user's, and so
    is what was put into one.
    """
    folder = tmp_path / "site-packages"
    (folder / "some_library").mkdir(parents=True)
    init = "super().__init__(); self.parts = nn.ModuleList([nn.Linear(2, 2)])"
    code = f"from torch import nn\nclass Block(nn.Module):\n    def __init__(self): {init}\n"
    (folder / "some_library" / "__init__.py").write_text(code)
    monkeypatch.syspath_prepend(folder)
    library = importlib.import_module("some_library")
    monkeypatch.delitem(sys.modules, "some_library")
    monkeypatch.setitem(sys.modules, "some_library", library)

    class Derived(library.Block):  # type: ignore[name-defined, misc]
        pass

    model = encoder()
    model.block = library.Block()
    model.block.parts.append(Derived())
    model.block.head, model.block.other = nn.Linear(2, 2), Derived()
    assert libraries_of(model) == dict.fromkeys(("block", "block.parts", "block.parts.0"), "some_library")
    assert list(libraries_of(library.Block())) == ["", "parts", "parts.0"]


def test_layout_is_append_only() -> None:
    """Sites keep their places when layers come, go and change."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    before = layout_of(find_layers(model))
    model.insert(0, nn.Linear(3, 2))  # the old layers are renamed
    model.add_module("extra", nn.LayerNorm(2))
    after = layout_of(find_layers(model), before=before)
    assert [site.name for site in after.sites[: len(before)]] == [site.name for site in before.sites]
    assert after.sites[after.find("0.weight")].numel == 6
    assert [after.sites[i].name for i in after.layers] == ["0", "1", "2", "extra"]
    for place, owner in zip(after.parameters, after.owners, strict=True):
        assert after.sites[place].name.startswith(after.sites[owner].name)


def test_sizes_and_dtypes_of_sites() -> None:
    model = nn.Sequential(nn.Linear(3, 4).half(), nn.LazyLinear(2))
    layout = layout_of(find_layers(model))
    assert layout.sites[layout.find("0")].numel == 16
    assert layout.sites[layout.find("0.weight")].dtype == "float16"
    assert layout.sites[layout.find("1.weight")].numel == 0
    assert is_lazy(model[1].weight)
    assert not is_lazy(model[0].weight)
    assert layout.sites[layout.find("1")].module == "LazyLinear"


def replaced(model: nn.Module) -> None:
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())


def handed_on(model: nn.Module) -> None:
    model.tail.weight = model.head.weight
    model.head.weight = None


def renamed(model: nn.Module) -> None:
    model.head.scale = model.head.weight
    del model.head.weight


def exchanged(model: nn.Module) -> None:
    model.encoder[1] = nn.Sequential(*model.encoder[1])


def inserted(model: nn.Module) -> None:
    model.encoder.insert(0, nn.Identity())


def materialised(model: nn.Module) -> None:
    model.later(torch.ones(1, 3))


def resized(model: nn.Module) -> None:
    model.head.weight.data = torch.ones(1, 3)


def compiled(model: nn.Module) -> None:
    model.head.compile()


CHANGES = (replaced, handed_on, renamed, exchanged, inserted, materialised, resized, compiled)


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_any_change_of_what_a_model_is_made_of_is_seen(change: Callable[[nn.Module], None]) -> None:
    model = encoder()
    model.tail = nn.Linear(2, 1, bias=False)
    model.tail.weight = None
    model.later = nn.LazyLinear(2)
    before = structure_of(model)
    with torch.no_grad():
        model.head.weight.add_(1)
    model.eval()
    assert structure_of(model) == before, "neither a step nor a mode is a change"
    change(model)
    assert structure_of(model) != before


@pytest.mark.parametrize(("layers", "partial"), [(None, False), ("*", False), ("0", True), (["*", "!2"], True)])
def test_a_layout_says_whether_all_layers_are_watched(layers: Any, partial: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Watch(model, layers=layers) as watch:
        model(torch.ones(4, 3)).sum().backward()
        watch.step(optimizer)
    assert watch.history.layout.partial is partial
