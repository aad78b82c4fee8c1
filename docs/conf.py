"""How Sphinx builds the site: `make docs`. A warning is an error there; search is a file, so it works offline."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent / "_ext")]

from fzero import __version__  # noqa: E402

project = "fzero"
author = "the developers of fzero"
release = version = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "fzero_site"]
exclude_patterns = ["_ext", "_build"]
myst_heading_anchors = 4
default_role = "code"
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
toc_object_entries = False  # each public name has a heading
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
highlight_language = "text"
nitpicky = False
html_theme = "furo"
html_title = f"fzero {release}"
html_show_copyright = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["versions.js"]
