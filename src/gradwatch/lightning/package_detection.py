"""Detects whether the user trains with `lightning` or `pytorch_lightning`, and makes callbacks work with either."""

from __future__ import annotations

import sys
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from typing import Any, TypeVar

T = TypeVar("T")

_USER_CHOSE_LIGHTNING = "lightning.pytorch" in sys.modules
"""Evaluated at the import of this file, which GradWatch's callbacks do before they import Lightning."""


class PackageAware:
    """First base class of callbacks for either package: instances are also a `Callback` of the user's package."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__new__" not in vars(cls):

            def new(cls: type[T], *args: object, **kwargs: object) -> T:
                return object.__new__(for_users_package(cls))

            # for editors and LightningCLI, which show the arguments of the signature
            new.__signature__ = signature(cls.__init__)  # type: ignore[attr-defined]
            cls.__new__ = new  # type: ignore[method-assign]

    def forget_module(self) -> None:
        """Remove the bound methods of the module that Lightning has put here: they hold the model."""
        self.__dict__.pop("log", None)
        self.__dict__.pop("log_dict", None)


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
