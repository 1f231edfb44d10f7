"""What a Trainer tells the flight recorder at an incident."""

from __future__ import annotations

from gradwatch.lightning.trainer_context import plain_settings


def test_settings_without_an_end_are_left_out() -> None:
    assert plain_settings({"a": "x" * 2**21}) == {"notes": {"": "left out: it is larger than 1 MiB"}}
