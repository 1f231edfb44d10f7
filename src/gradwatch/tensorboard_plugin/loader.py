"""What TensorBoard loads at its start: keeps enough of the record, and brings the tab, or nothing if it cannot."""

from __future__ import annotations

from typing import Any

from tensorboard.plugins import base_plugin  # type: ignore[import-untyped]
from tensorboard.util import tb_logging  # type: ignore[import-untyped]

from gradwatch.sinks.record.record_format import PLUGIN

RETENTION = 4096
"""Records of a run that TensorBoard keeps in memory for us, unless `--samples_per_plugin gradwatch=...` says otherwise;
its own default is 100 (fast loader) or 10. 1,000 layers at each of 4,096 steps are 16 MB. Judgement."""


class Loader(base_plugin.TBLoader):  # type: ignore[misc]
    """The entry point. A failure of ours is logged once, and TensorBoard goes on without the tab."""

    def fix_flags(self, flags: Any) -> None:
        """Raise the number of records kept, where the user has not set it."""
        try:
            flags.samples_per_plugin.setdefault(PLUGIN, RETENTION)
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
