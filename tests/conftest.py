"""What holds for every test: one torch thread, and no hook of ours that outlives it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from gradwatch.hooks import HookSet

torch.set_num_threads(1)  # the tensors are tiny, and the machine is shared


@pytest.fixture(autouse=True)
def no_hook_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fails a test after which a hook that a HookSet was given is still on what it was put on."""
    handles: list[Any] = []
    add = HookSet.add

    def remember(self: HookSet, handle: Any) -> None:
        handles.append(handle)
        add(self, handle)

    monkeypatch.setattr(HookSet, "add", remember)
    yield
    left = 0
    for handle in handles:
        # a RemovableHandle knows, weakly, the dictionary it stands in
        reference = getattr(handle, "hooks_dict_ref", None)
        hooks = reference() if reference is not None else None
        left += hooks is not None and handle.id in hooks
    assert not left, f"{left} of {len(handles)} hooks were left behind"
