"""Sphinx settings of the documentation: `make docs` builds it with warnings as errors.

The source is the root of the repository, so that links between pages, READMEs,
benchmarks and examples are the same in the repository and on the site.
"""

import halfstep

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
exclude_patterns = ["docs/conf.py"]

myst_enable_extensions = ["dollarmath", "colon_fence", "deflist"]
myst_heading_anchors = 4
suppress_warnings = ["myst.header"]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
napoleon_google_docstring = True
napoleon_numpy_docstring = False

html_theme = "furo"
html_title = "halfstep"
html_show_sphinx = False
