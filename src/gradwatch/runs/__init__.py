"""Recorded runs: finding them on disk and reading what they say. Needs neither torch nor Lightning."""
