"""Draws docs/pictures/heatmap.png, the heatmap of the unhealthy run of the demo: `python docs/pictures/heatmap.py`."""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from gradwatch.cli.demo_training import demo
from gradwatch.sinks.tensorboard.builtin_tabs import PICTURE_TAG

PICTURE = Path(__file__).with_suffix(".png")


def main() -> int:
    with TemporaryDirectory() as folder:
        demo(Path(folder), epochs=5)
        events = EventAccumulator(str(next(Path(folder).glob("unhealthy/version_*"))))
        events.Reload()
        PICTURE.write_bytes(events.Images(PICTURE_TAG)[-1].encoded_image_string)
    print(f"drawn: {PICTURE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
