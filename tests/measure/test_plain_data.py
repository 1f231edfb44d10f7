"""Whatever a batch is made of: what is kept of it loads with `weights_only`, is bounded, and says what is not."""

from __future__ import annotations

import io
from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from gradwatch.measure.plain_data import MAX_ENTRIES, TooLarge, to_plain_data

MIB = 2**20
Pair = namedtuple("Pair", "image label")


class Kind(IntEnum):
    CAT = 3


@dataclass
class Scene:
    image: Any
    name: str = "a"


class Graph:
    def __init__(self) -> None:
        self.edges = torch.tensor([[0, 1], [1, 0]])
        self.draw = print


class Rude:
    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise PermissionError("no")


def through_file(thing: Any) -> Any:
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def kept(thing: Any, room: int = MIB) -> tuple[Any, dict[str, str]]:
    """What is read again, and the notes."""
    copy, notes = to_plain_data(thing, max_bytes=room)
    return through_file(copy), notes


def test_plain_things_stay_as_they_are() -> None:
    batch = {"x": [1, 2.5, True, None, "a", b"b", 1j], 3: (1, (2, [])), "empty": {}}
    assert kept(batch) == (batch, {})


NUMBERS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary(min_size=1)
)


@given(
    st.recursive(
        NUMBERS,
        lambda inner: st.one_of(
            st.lists(inner, max_size=4), st.dictionaries(st.text(), inner, max_size=4), st.tuples(inner, inner)
        ),
        max_leaves=12,
    )
)
def test_any_nest_of_plain_things_stays_as_it_is(batch: Any) -> None:
    assert kept(batch) == (batch, {})


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 4).t(),
        torch.randn(1, 5).expand(4, 5),
        torch.randn(8, dtype=torch.complex64).conj(),
        torch.randn(4).to(torch.bfloat16),
        torch.zeros(0, 3),
        torch.tensor(3),
        torch.randn(3, requires_grad=True) * 2,
        nn.Parameter(torch.ones(2)),
        torch.tensor([True, False]),
    ],
    ids=["transposed", "expanded", "conjugated", "bfloat16", "empty", "number", "in a graph", "parameter", "truths"],
)
def test_tensors_are_copied_bit_for_bit(tensor: torch.Tensor) -> None:
    copy, notes = kept([tensor])
    assert copy[0].dtype == tensor.dtype
    assert torch.equal(copy[0], tensor.detach().resolve_conj())
    assert not copy[0].requires_grad
    assert notes == {}


def test_a_view_does_not_bring_all_that_it_is_a_view_of() -> None:
    whole = torch.randn(10_000, 100)
    copy, _ = to_plain_data(whole[7], max_bytes=1000)
    assert copy.untyped_storage().nbytes() == 400
    whole[7] = 0
    assert copy.abs().sum() > 0


def test_what_becomes_something_else_is_said() -> None:
    batch = {
        "pair": Pair(torch.ones(2), 1),
        "scene": Scene(torch.zeros(2)),
        "array": np.arange(3.0),
        "words": np.array(["a", "b"]),
        "number": np.float32(1.5),
        "kind": Kind.CAT,
        "user": UserDict(a=1),
        "ordered": OrderedDict(b=2),
        "set": {4},
        "bytes": b"",
        (1, 2): "key",
    }
    copy, notes = kept(batch)
    assert torch.equal(copy["pair"]["image"], torch.ones(2))
    assert copy["scene"]["name"] == "a"
    assert copy["array"].tolist() == [0.0, 1.0, 2.0]
    assert copy["words"] == ["a", "b"]
    assert (copy["number"], copy["kind"], copy["user"], copy["ordered"]) == (1.5, 3, {"a": 1}, {"b": 2})
    assert (copy["set"], copy["bytes"]) == ([4], "")
    assert copy["(1, 2)"] == "key"
    here = f"a {__name__}."
    assert notes == {
        "['pair']": f"{here}Pair, kept as a dict",
        "['scene']": f"{here}Scene, kept as a dict",
        "['array']": "a numpy array, kept as a tensor",
        "['user']": "a collections.UserDict, kept as a dict",
        "['ordered']": "a collections.OrderedDict, kept as a dict",
        "['set']": "a set, kept as a list",
        "['bytes']": "empty bytes, kept as empty text",
    }


def test_what_cannot_be_kept_is_left_out_and_said() -> None:
    sequence = pack_sequence([torch.ones(2, 1), torch.ones(1, 1)])
    copy, notes = kept([Graph(), nn.Linear(1, 1), torch.eye(2).to_sparse(), Rude(), object(), int, sequence])
    assert copy[0]["edges"].tolist() == [[0, 1], [1, 0]]
    assert copy[1:6] == [None] * 5
    assert copy[6]["data"].shape == (3, 1)
    assert notes["[0].draw"] == "left out: a builtin_function_or_method is no data"
    assert notes["[1]"] == "left out: a torch.nn.modules.linear.Linear is no data"
    assert notes["[2]"].startswith("left out: a torch.Tensor (torch.sparse_coo, torch.float32, cpu)")
    assert notes["[3]"].endswith("cannot be read: PermissionError: no")
    assert notes["[4]"].startswith("left out: a object cannot be read: TypeError")
    assert notes["[5]"] == "left out: a type is no data"


def test_a_structure_that_leads_back_into_itself_ends() -> None:
    loop: list[Any] = [1]
    loop.append(loop)
    _, notes = kept(loop)
    assert set(notes.values()) == {"left out: nested deeper than 24 levels"}


@pytest.mark.parametrize(
    ("batch", "why"),
    [
        ([torch.zeros(200_000), torch.zeros(200_000)], "larger than 1 MiB"),
        ({"text": "x" * (MIB + 1)}, "larger than 1 MiB"),
        (np.zeros(MIB), "larger than 1 MiB"),
        (list(range(MAX_ENTRIES)), f"more than {MAX_ENTRIES} entries"),
    ],
    ids=["tensors", "text", "array", "entries"],
)
def test_what_is_too_large_is_not_copied(batch: Any, why: str) -> None:
    with pytest.raises(TooLarge, match=why):
        to_plain_data(batch, max_bytes=MIB)
