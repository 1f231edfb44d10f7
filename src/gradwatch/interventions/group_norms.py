"""The norms of groups of gradients from the norms of their members."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwatch.measure.devices import moved


class GroupNorms:
    """n gradients in groups: the norm of a group is the root of the sum of its members' squares."""

    def __init__(self, groups: Sequence[int], device: torch.device) -> None:
        """`groups`: one index for each of the n, the same within a group."""
        known: dict[int, int] = {}
        self.groups = [known.setdefault(group, len(known)) for group in groups]
        """The same, numbered from 0 in order of first occurrence."""
        self.count = len(known)
        members: list[list[int]] = [[] for _ in known]
        for member, group in enumerate(self.groups):
            members[group].append(member)
        self._members = torch.arange(len(self.groups), device=device)
        self._alone = self.count == len(self.groups)
        if self._alone:
            return
        widest = max(map(len, members))
        # summed row by row, which always gives the same bits; index_add_ does not on an accelerator
        rows = [own + [len(self.groups)] * (widest - len(own)) for own in members]
        self._rows = moved(torch.tensor(rows, dtype=torch.int64, device="cpu"), device)
        self._groups = moved(torch.tensor(self.groups, dtype=torch.int64, device="cpu"), device)

    def norms(self, norms: Tensor) -> Tensor:
        """The norms of the groups, shape [count], from those of the n gradients."""
        if self._alone:
            return norms
        squares = torch.cat([norms.square(), norms.new_zeros(1)])
        return squares[self._rows].sum(dim=1).sqrt_()

    def first_present(self, present: Tensor) -> Tensor:
        """For each group its first member that is `present`, bool, shape [n]; n where none is."""
        none = len(self.groups)
        members = torch.where(present, self._members, none)
        if self._alone:
            return members
        return torch.cat([members, members.new_full((1,), none)])[self._rows].amin(dim=1)

    def for_each(self, numbers: Tensor) -> Tensor:
        """For each of the n gradients the value of its group."""
        return numbers if self._alone else numbers[self._groups]
