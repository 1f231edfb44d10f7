"""The record of a run on disk: its format, the writers, and what bounds its size.

`runs` reads it back.
"""
