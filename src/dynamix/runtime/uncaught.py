"""What an error that nobody catches leaves behind: a note for its reader, a word for the other ranks."""

import sys
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Protocol


class UncaughtListener(Protocol):
    """Who is told of the error that ends this process."""

    def uncaught(self, error: BaseException) -> None: ...


_listeners: weakref.WeakSet[UncaughtListener] = weakref.WeakSet()
_before: list[Callable[[type[BaseException], BaseException, TracebackType | None], object]] = []


def tell_of_uncaught(listener: UncaughtListener) -> None:
    """As long as `listener` lives, call it before an error that nobody caught is printed (`sys.excepthook`)."""
    _listeners.add(listener)
    if not _before:
        _before.append(sys.excepthook)
        sys.excepthook = _print


def _print(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    for listener in list(_listeners):
        try:
            listener.uncaught(error)
        except Exception as second:  # the user's error must be printed, whatever happens here
            error.add_note(f"dynamix: {second!r} while this error was told to other ranks")
    _before[0](kind, error, trace)
