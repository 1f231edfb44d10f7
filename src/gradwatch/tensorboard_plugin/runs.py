"""Which runs TensorBoard has a record of, and what is in them: from the tags' metadata, without reading the record."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradwatch.sinks.record import run_metadata
from gradwatch.sinks.record.record_format import PLUGIN, VERSION

RECORD = f"{PLUGIN}/record/"

EVERYTHING = 10**6
"""Records of a tag that TensorBoard is asked for: all that it has kept, and it wants a number."""


@dataclass(frozen=True, slots=True)
class Tag:
    """One tag of the record."""

    tag: str
    statistic: str
    part: str
    """What tells apart the tags of one statistic: fingerprint of the names, and the optimizer."""
    optimizer: int
    label: str
    names: tuple[str, ...]
    modules: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    """Of parameters."""
    last: int
    """The last step so far."""
    updated: float
    """When that was, in seconds since 1970."""


@dataclass(frozen=True, slots=True)
class RunTags:
    """What a run has."""

    tags: tuple[Tag, ...]
    facts: tuple[str, ...]
    """Which of `meta`, `alerts` and `verdict`."""
    foreign: int
    """Tags that this GradWatch cannot read: a later one's."""

    @property
    def updated(self) -> float:
        return max((tag.updated for tag in self.tags), default=0.0)

    @property
    def last(self) -> int:
        return max((tag.last for tag in self.tags), default=0)

    def of(self, statistic: str) -> tuple[Tag, ...]:
        return tuple(tag for tag in self.tags if tag.statistic == statistic)


class TensorBoardData:
    """TensorBoard's data, as far as it is ours. `provider` is a `tensorboard.data.provider.DataProvider`."""

    def __init__(self, provider: Any, context: Any, experiment: str) -> None:
        """`context` and `experiment`: whose request this is, and what of."""
        self._provider, self._context, self.experiment = provider, context, experiment

    def runs(self, run: str | None = None) -> dict[str, RunTags]:
        """Run -> what it has; of one `run` or of all."""
        found = self._provider.list_tensors(
            self._context, experiment_id=self.experiment, plugin_name=PLUGIN, run_tag_filter=_only(run, None)
        )
        return {name: _listing(series) for name, series in found.items()}

    def read(self, run: str, tags: Sequence[str]) -> Mapping[str, list[Any]]:
        """Tag -> its data, `TensorDatum`s with `step` and `numpy`, oldest first."""
        found = self._provider.read_tensors(
            self._context,
            experiment_id=self.experiment,
            plugin_name=PLUGIN,
            downsample=EVERYTHING,
            run_tag_filter=_only(run, tags),
        )
        return found.get(run, {})  # type: ignore[no-any-return]


def _only(run: str | None, tags: Sequence[str] | None) -> Any:
    from tensorboard.data import provider  # type: ignore[import-untyped]

    return provider.RunTagFilter(runs=None if run is None else [run], tags=tags)


def _listing(series: Mapping[str, Any]) -> RunTags:
    tags, kinds, foreign = [], [], 0
    said = {key: _about(data) for key, data in series.items()}
    named = {_fingerprint(key): about for key, about in said.items() if about.get("names")}
    for key, data in series.items():
        about = said[key] and {**named.get(_fingerprint(key), {}), **said[key]}
        if key.startswith(run_metadata.PREFIX) and about.get("version") == run_metadata.VERSION:
            kinds.append(key.removeprefix(run_metadata.PREFIX))
        elif key.startswith(RECORD) and about.get("version") == VERSION:
            tags.append(_tag(key, about, data))
        else:
            foreign += 1
    return RunTags(tuple(sorted(tags, key=lambda tag: (len(tag.names), tag.optimizer))), tuple(kinds), foreign)


def _fingerprint(key: str) -> str:
    """Of the names, which the file says once; empty where they are none of the layers."""
    return f"{key}//".removeprefix(RECORD).split("/")[1]


def _about(series: Any) -> dict[str, Any]:
    try:
        about = json.loads(series.plugin_content)
    except ValueError:
        return {}
    return about if isinstance(about, dict) else {}


def _tag(key: str, about: Mapping[str, Any], series: Any) -> Tag:
    statistic, _, part = key.removeprefix(RECORD).partition("/")
    names = tuple(map(str, about.get("names", ())))
    modules = tuple(map(str, about.get("modules", ()))) or ("",) * len(names)
    optimizer = int(about.get("optimizer", 0))
    label = str(about.get("label", ""))
    shapes = tuple(tuple(int(size) for size in shape) for shape in about.get("shapes", ()))
    return Tag(key, statistic, part, optimizer, label, names, modules, shapes, series.max_step, series.max_wall_time)
