"""Recognises objects by the names of their classes, which then need not be imported."""

from __future__ import annotations


def class_names(thing: object) -> tuple[str, ...]:
    """Names of the class of `thing` and of its base classes, itself first. They are the same in the packages
    `lightning` and `pytorch_lightning`, and the user's own class is known by the one that it extends.
    """
    return tuple(kind.__name__ for kind in type(thing).__mro__)
