"""Sphinx's settings: `scripts/docs` builds the site, warnings are errors, and pages load nothing from elsewhere."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / folder) for folder in ("docs/_ext", "lab/src", "homomorphic/src", "src")]

import dynamix  # noqa: E402

project = "dynamix"
author = "the dynamix authors"
copyright = "the dynamix authors, Apache-2.0"
version = release = dynamix.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "plain_docstrings", "outside_files"]
myst_enable_extensions = ["colon_fence", "attrs_inline", "attrs_block"]
myst_heading_anchors = 4
default_role = "code"
exclude_patterns = ["_ext"]
nitpicky = True
nitpick_ignore_regex = [("py:.*", ".*")]  # annotations name classes of torch and NumPy, which have no pages here

autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 80

html_theme = "furo"
html_title = f"dynamix {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#1f5f99", "color-brand-content": "#1f5f99"},
    "dark_css_variables": {"color-brand-primary": "#7db8ee", "color-brand-content": "#7db8ee"},
}
