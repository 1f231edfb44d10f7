"""Arrays of a checkpoint in one tensor: they come back as they were, and nothing else is taken for one."""

from __future__ import annotations

import io
import json
from typing import Any

import numpy as np
import pytest
import torch

from gradwatch.engine.joined_arrays import ARRAY, join_arrays, split_arrays

ARRAYS = (
    np.arange(6, dtype=np.int32).reshape(2, 3),
    np.array([np.nan, np.inf, -0.0, 1e-310]),
    np.array([[True], [False]]),
    np.zeros((0, 4), dtype=np.float32),
    np.array(7, dtype=np.int8),
    np.arange(12.0).reshape(3, 4)[::2, ::-1].T,
)


def saved(tree: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(join_arrays(tree), file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


def test_arrays_come_back_with_type_shape_and_bits() -> None:
    found = split_arrays(saved({"all": {str(place): array for place, array in enumerate(ARRAYS)}}))["all"]
    for array, back in zip(ARRAYS, found.values(), strict=True):
        assert (back.dtype, back.shape) == (array.dtype, array.shape)
        assert back.tobytes() == array.tobytes()
        back[...] = 0  # it may be written to


def test_the_rest_comes_back_as_json_has_it() -> None:
    tree = {
        "none": None,
        "names": ["a", "\udcff", "ж"],
        "inner": {"inf": float("inf"), "first": 3, "array": "<f8"},
        "empty": {},
    }
    assert split_arrays(saved(tree)) == tree


def test_a_state_is_one_tensor_and_a_text() -> None:
    state = join_arrays({"a": ARRAYS[0], "b": [1, 2]})
    assert {type(value) for value in state.values()} == {torch.Tensor, str}


@pytest.mark.parametrize(
    "leaf",
    [
        {ARRAY: "<f8", "shape": [99], "first": 0},
        {ARRAY: "<f8", "shape": [2], "first": 17},
        {ARRAY: "<f8", "shape": [2], "first": -8},
        {ARRAY: "|O", "shape": [1], "first": 0},
        {ARRAY: "nothing", "shape": [1], "first": 0},
        {ARRAY: "<f8", "first": 0},
        {ARRAY: "<f8", "shape": [2**40, 2**40], "first": 0},
    ],
    ids=str,
)
def test_what_is_no_array_is_refused(leaf: dict[str, Any]) -> None:
    with pytest.raises((LookupError, TypeError, ValueError)):
        split_arrays({**join_arrays({"a": np.zeros(2)}), "text": json.dumps({"a": leaf})})
