"""The runs of which TensorBoard has a record, from the metadata of their tags, without reading the record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from time import sleep
from typing import Any

from tensorboard.data.provider import RunTagFilter  # type: ignore[import-untyped]

from gradwatch.core.typed_values import InvalidError, moment
from gradwatch.sinks.record import limits, run_metadata
from gradwatch.sinks.record.record_format import PLUGIN, RECORD_TAG_PREFIX, TagDescription, parse_metadata

ALL_EVENTS = 10**6
"""Events of a tag that TensorBoard is asked for: all that it has kept, and it wants a number."""

TRIES, BETWEEN_TRIES = 5, 0.05
"""How often TensorBoard is asked which tags there are, and seconds between. Judgement: it reads an event in less."""


@dataclass(frozen=True, slots=True)
class RecordTag:
    """One tag of the record."""

    tag: str
    description: TagDescription
    last: int
    """The last step so far."""
    updated: float
    """When that was, in seconds since 1970."""


@dataclass(frozen=True, slots=True)
class RunTags:
    """What a run has."""

    tags: tuple[RecordTag, ...]
    """Those of the record: one, or more where the layers have changed."""
    texts: tuple[str, ...]
    """Which of `meta`, `alerts` and `verdict`."""
    foreign: int
    """Tags that this GradWatch cannot read: another version's."""

    @property
    def updated(self) -> float:
        return max((tag.updated for tag in self.tags), default=0.0)

    @property
    def last(self) -> int:
        return max((tag.last for tag in self.tags), default=0)


class TensorBoardData:
    """GradWatch's part of TensorBoard's data. `provider`: a `tensorboard.data.provider.DataProvider`."""

    def __init__(self, provider: Any, context: Any, experiment: str) -> None:
        """`context` and `experiment`: whose request this is, and what of."""
        self._provider, self._context, self.experiment = provider, context, experiment

    def runs(self, run: str | None = None) -> dict[str, RunTags]:
        """Run -> what it has; of one `run` or of all."""
        return {name: _listing(series) for name, series in self._listed(run).items()}

    def read(self, run: str, tags: Sequence[str]) -> Mapping[str, list[Any]]:
        """Tag -> its data, `TensorDatum`s with `step` and `numpy`, oldest first.

        A tag of which TensorBoard cannot make arrays is left out.
        """
        try:
            found = self._provider.read_tensors(
                self._context,
                experiment_id=self.experiment,
                plugin_name=PLUGIN,
                downsample=ALL_EVENTS,
                run_tag_filter=RunTagFilter(runs=[run], tags=tags),
            )
        except (ValueError, TypeError, MemoryError):  # a tensor's shape is not that of its numbers, for example
            if len(tags) == 1:
                return {}
            return {tag: data for each in tags for tag, data in self.read(run, [each]).items()}
        return found.get(run, {})  # type: ignore[no-any-return]

    def _listed(self, run: str | None) -> Mapping[str, Mapping[str, Any]]:
        """Run -> tag -> what TensorBoard says of it."""
        chosen = RunTagFilter(runs=None if run is None else [run])
        ask = partial(
            self._provider.list_tensors,
            self._context,
            experiment_id=self.experiment,
            plugin_name=PLUGIN,
            run_tag_filter=chosen,
        )
        for _ in range(TRIES - 1):
            with suppress(KeyError):  # TensorBoard's slower reader has the name of a new tag before its first event
                return ask()  # type: ignore[no-any-return]
            sleep(BETWEEN_TRIES)
        return ask()  # type: ignore[no-any-return]


def _listing(series: Mapping[str, Any]) -> RunTags:
    tags, kinds, foreign = [], [], 0
    for key, data in series.items():
        try:
            if key.startswith(RECORD_TAG_PREFIX):
                description = parse_metadata(data.plugin_content)
                updated = moment(data.max_wall_time, "the last event's time")
                tags.append(RecordTag(key, description, data.max_step, updated))
            elif key.startswith(run_metadata.RUN_TAG_PREFIX):
                limits.object_of(data.plugin_content, version=run_metadata.TEXT_VERSION)
                kinds.append(key.removeprefix(run_metadata.RUN_TAG_PREFIX))
            else:
                foreign += 1
        except InvalidError:
            foreign += 1
    return RunTags(tuple(sorted(tags, key=lambda tag: len(tag.description.names))), tuple(kinds), foreign)
