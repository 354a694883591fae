"""Sets attributes of torch's and users' objects, also temporarily."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def put(held: Any, **values: Any) -> None:
    """Set these attributes of `held`."""
    for name, value in values.items():
        setattr(held, name, value)


@contextmanager
def holding(held: Any, **values: Any) -> Iterator[None]:
    """Set these attributes of `held` inside, and restore them afterwards.

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
        put(held, **values)
        yield
    finally:
        put(held, **before)
