"""What TensorBoard loads at its start: keeps and follows the record, and brings the tab, or nothing if it cannot."""

from __future__ import annotations

from typing import Any

from tensorboard.plugins import base_plugin  # type: ignore[import-untyped]
from tensorboard.util import tb_logging  # type: ignore[import-untyped]

from gradwatch.sinks.record.record_format import EVENT_BYTES, PLUGIN

RETENTION = 64 * 2**20 // EVENT_BYTES
"""Events of a run that TensorBoard keeps in memory for us, unless `--samples_per_plugin gradwatch=...` says otherwise;
its own default is 100 (fast loader) or 10. They take 64 MiB: 32,000 steps of 300 layers, where a step takes 2 kB.
Judgement. (Where a single step takes more than `EVENT_BYTES`, of thousands of layers, they take more.)"""

DAY, WEEK = 86_400, 7 * 86_400
"""Seconds for which TensorBoard follows one of several files that does not grow; and for which it does so with us: a
run that logs once in an epoch of two days is followed as it is where there is one file. Judgement."""


class Loader(base_plugin.TBLoader):  # type: ignore[misc]
    """The entry point. A failure of ours is logged once, and TensorBoard goes on without the tab."""

    def fix_flags(self, flags: Any) -> None:
        """Where the user has not set them: more of ours are kept; and of several files in a folder, as ours and the
        user's, the slower loader follows all, where it would follow the last.
        """
        try:
            flags.samples_per_plugin.setdefault(PLUGIN, RETENTION)
            if flags.reload_multifile is None:
                flags.reload_multifile = True
                if flags.reload_multifile_inactive_secs == DAY:
                    flags.reload_multifile_inactive_secs = WEEK
        except Exception as error:
            _report(error)

    def load(self, context: Any) -> Any:
        """The tab, or None."""
        try:
            from gradwatch.tensorboard_plugin.plugin import GradWatchPlugin

            return GradWatchPlugin(context)
        except Exception as error:
            _report(error)
            return None


def _report(error: Exception) -> None:
    tb_logging.get_logger().warning("The GradWatch tab is not there: %s: %s", type(error).__name__, error)
