"""Which Lightning package the user trains with, `lightning` or `pytorch_lightning`, and callbacks that fit either."""

from __future__ import annotations

import sys
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from typing import Any, TypeVar

T = TypeVar("T")

_USER_CHOSE_LIGHTNING = "lightning.pytorch" in sys.modules
"""Evaluated when this file is imported; our callbacks do so before they import Lightning themselves."""


class PackageAware:
    """First base of a callback for either package: an instance is a `Callback` of the package that the user has."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__new__" not in vars(cls):

            def new(cls: type[T], *args: object, **kwargs: object) -> T:
                return object.__new__(for_users_package(cls))

            # for editors, and for LightningCLI, which offers the arguments that it sees
            new.__signature__ = signature(cls.__init__)  # type: ignore[attr-defined]
            cls.__new__ = new  # type: ignore[method-assign]


def for_users_package(cls: type[T]) -> type[T]:
    """`cls`, or a subclass of it that is a `pytorch_lightning` callback too, if the user trains with that package."""
    module = sys.modules.get("pytorch_lightning")
    if module is None and not _USER_CHOSE_LIGHTNING and find_spec("pytorch_lightning"):
        module = import_module("pytorch_lightning")
    other = getattr(module, "Callback", None)
    if other is None or issubclass(cls, other):
        return cls
    mixed: type[T] = _mixed(cls, other)  # type: ignore[arg-type] # a class has a hash, whatever its instances have
    return mixed


def plain_class(cls: type[T]) -> type[T]:
    """The class that `for_users_package` was given, which can be imported by its name, as pickle requires."""
    return getattr(cls, "_plain", cls)


@cache
def _mixed(cls: Any, other: Any) -> Any:
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "_plain": cls}
    return type(cls.__name__, (cls, other), names)
