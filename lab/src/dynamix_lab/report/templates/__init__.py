"""The templates of tables and pages, and the function that fills them."""

from __future__ import annotations

import functools
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined


@functools.cache
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("dynamix_lab.report"),
        autoescape=lambda name: bool(name and name.endswith(".html")),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def rendered(template: str, **values: Any) -> str:
    """Fill a template of this folder with `values`. In .html templates everything except markup is escaped."""
    return _environment().get_template(template).render(**values)
