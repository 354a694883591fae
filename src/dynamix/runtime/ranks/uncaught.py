"""Handles errors that nobody catches: a note for the reader, a message to the other ranks."""

import sys
import weakref
from collections.abc import Callable
from types import TracebackType

Listener = Callable[[BaseException], None]
_listeners: list[weakref.WeakMethod[Listener]] = []
_before: list[Callable[[type[BaseException], BaseException, TracebackType | None], object]] = []


def tell_of_uncaught(listener: Listener) -> None:
    """While the owner of this method lives, call the method before an uncaught error is printed.

    Listeners that were added last are called first.
    """
    # Without a callback, which the interpreter would call at its end, when the modules that it needs are gone.
    _listeners.append(weakref.WeakMethod(listener))
    if not _before:
        _before.append(sys.excepthook)
        sys.excepthook = _print


def _print(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    for known in _listeners[::-1]:
        try:
            if (listener := known()) is not None:
                listener(error)
        except Exception as second:  # the user's error must be printed, whatever happens here
            error.add_note(f"dynamix: {second!r} while this error was told to other ranks")
    _before[0](kind, error, trace)
