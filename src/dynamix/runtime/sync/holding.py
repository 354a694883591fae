"""Attributes of torch's and of users' objects, for a while."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def holding(held: Any, **values: Any) -> Iterator[None]:
    """Inside, the attributes of `held` have these values.

    >>> from types import SimpleNamespace
    >>> model = SimpleNamespace(training=True)
    >>> with holding(model, training=False):
    ...     model.training
    False
    >>> model.training
    True
    """
    before = {name: getattr(held, name) for name in values}
    try:
        for name, value in values.items():
            setattr(held, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(held, name, value)
