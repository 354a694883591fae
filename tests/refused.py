"""A call that must be refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def refused(error: type[BaseException], says: str, call: Callable[..., Any], /, *args: Any, **options: Any) -> None:
    """That `call(*args, **options)` raises this error, with words that match `says`; "": with any."""
    __tracebackhide__ = True
    with pytest.raises(error, match=says or None):
        call(*args, **options)
