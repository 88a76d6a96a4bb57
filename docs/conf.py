"""How the site is built: `make docs`. Warnings are errors; the reference is written from the code at every build."""

import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
sys.path[:0] = [str(DOCS / "_ext"), str(DOCS.parent / "tests"), str(DOCS.parent / "src")]

project = "spanwise"
author = copyright = "The spanwise authors"
html_title = "spanwise"

extensions = ["myst_nb", "sphinx_copybutton", "reference_in_pages", "pictures_and_links"]
exclude_patterns = ["_build", "_ext", "**/.ipynb_checkpoints"]
nitpicky = True
# Annotations name types of PyTorch, NumPy and jaxtyping, whose sites cannot be asked while building.
nitpick_ignore_regex = [(r"py:.*", r".*")]
suppress_warnings = ["config.cache", "toc.empty_glob"]  # a page in no toctree is still a warning

myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence", "deflist", "attrs_inline", "attrs_block", "fieldlist"]
nb_execution_mode = "off"  # notebooks are run by the tests, and shown with what they printed
nb_render_markdown_format = "myst"

add_module_names = False
smartquotes = False  # options begin with two dashes
toc_object_entries = False  # every name has a heading
python_maximum_signature_line_length = 80
python_display_short_literal_types = True
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
highlight_language = "text"

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["spanwise.css"]
html_search_scorer = str(DOCS / "_static" / "scorer.js")
html_show_sphinx = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#1f5fa8", "color-brand-content": "#1f5fa8"},
    "dark_css_variables": {"color-brand-primary": "#7fb2ee", "color-brand-content": "#7fb2ee"},
}
linkcheck_timeout = 20
linkcheck_anchors = False  # those of our own pages are checked by docs/_ext/site_links.py in every build
