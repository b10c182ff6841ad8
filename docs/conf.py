"""Sphinx settings of the documentation: `make docs` builds it with warnings as errors.

The source is the root of the repository, so that links between pages, READMEs,
benchmarks and examples are the same in the repository and on the site.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import latex2mathml.converter
from docutils import nodes

import halfstep

sys.path.insert(0, str(Path(__file__).parent))
import op_tables

if TYPE_CHECKING:
    from sphinx.application import Sphinx
    from sphinx.writers.html5 import HTML5Translator

project = "halfstep"
author = "the halfstep developers"
copyright = "the halfstep developers, Apache-2.0"  # noqa: A001
version = release = halfstep.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
]
root_doc = "docs/index"
include_patterns = [
    "docs/**",
    "benchmarks/*.md",
    "*.md",
]
exclude_patterns = ["README*.md"]  # docs/index is the first page here

myst_enable_extensions = ["dollarmath", "colon_fence", "deflist"]
myst_heading_anchors = 4
suppress_warnings = ["myst.header"]

default_role = "code"  # so that `name` in a docstring is shown as code
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 80
toc_object_entries_show_parents = "hide"
smartquotes_action = "De"  # quotes in docstrings stay as they are
napoleon_google_docstring = True
napoleon_numpy_docstring = False

html_math_renderer = "mathml"  # browsers show it without a script from elsewhere
html_theme = "furo"
html_title = "halfstep"
html_show_sphinx = False
html_static_path = ["_static"]
html_css_files = ["docs.css"]
html_js_files = [("docs.js", {"defer": "defer"})]
html_extra_path = ["start"]  # index.html at the root of the site, which leads to docs/


RETURNED = (
    "halfstep.Session",
    "halfstep.StepReport",
    "halfstep.TensorStats",
    "halfstep.Decision",
    "halfstep.DtypeMismatch",
    "halfstep.LossScaleCollapse",
    "halfstep.casting.",
    "halfstep.diagnostics.",
    "halfstep.graph.",
    "halfstep.machine.",
    "halfstep.masters.",
    "halfstep.nonfinite.",
    "halfstep.numerics.tensor_stats.",
)
"""Classes whose instances a reader gets and does not make."""


def hide_constructor(
    _app: object,
    what: str,
    name: str,
    _obj: object,
    _options: object,
    signature: str | None,
    annotation: str | None,
) -> tuple[str | None, str | None]:
    """Show no arguments of classes that are only returned or raised."""
    if what in {"class", "exception"} and name.startswith(RETURNED):
        return "", None
    return signature, annotation


def keep_first_line(
    _app: object,
    what: str,
    _name: str,
    _obj: object,
    _options: object,
    lines: list[str],
) -> None:
    """Let a colon in an attribute's first line be text: napoleon reads "type: text"."""
    if what in {"attribute", "data", "property"}:
        lines[:0] = ["..", ""]  # an empty comment


def keep_aside(_app: object, docname: str, source: list[str]) -> None:
    """Keep dated measurements out of the sidebar and of the search; links find them."""
    if docname.startswith("benchmarks/20"):
        source[0] = f"---\norphan: true\nno-search: true\n---\n{source[0]}"


def set_language(
    _app: object,
    pagename: str,
    _template: str,
    context: dict[str, object],
    _doctree: object,
) -> None:
    """Mark Chinese pages as Chinese, for fonts and screen readers."""
    if pagename.startswith("docs/zh/"):
        context["language"] = "zh-CN"


def write_math(writer: HTML5Translator, node: nodes.math | nodes.math_block) -> None:
    """Write a formula as MathML."""
    display = "block" if isinstance(node, nodes.math_block) else "inline"
    formula = latex2mathml.converter.convert(node.astext(), display=display)
    writer.body.append(formula)
    raise nodes.SkipNode


def setup(app: Sphinx) -> None:
    """Connect the hooks."""
    app.add_html_math_renderer("mathml", (write_math, None), (write_math, None))
    app.connect("builder-inited", op_tables.write)
    app.connect("autodoc-process-docstring", keep_first_line, priority=400)
    app.connect("autodoc-process-signature", hide_constructor)
    app.connect("html-page-context", set_language)
    app.connect("source-read", keep_aside)
