"""Hooks whose errors end observing, never the job."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Protocol


class Stoppable(Protocol):
    """Something that observes while it is `on`."""

    on: bool


def never_fatal(observer: Stoppable, hook: Callable[..., Any]) -> Callable[..., Any]:
    """`hook`, wrapped so that an error ends observing, not the job.

    >>> class Observing: on = True
    >>> observer = Observing()
    >>> never_fatal(observer, int)("3"), never_fatal(observer, int)("x"), observer.on
    (3, None, False)
    """

    def guarded(*args: Any) -> Any:
        try:
            return hook(*args)
        except Exception as error:
            if observer.on:
                observer.on = False
                print(f"dynamix observe: stopped observing, training goes on ({error!r})", file=sys.stderr)
            return None

    return guarded
