"""Configure the site (`make docs`): Sphinx with the theme furo; tutorials are notebooks that myst-nb executes.

Pages about names (commands, recipes, models, claims …) are generated into docs/reference by pages.py. Texts that live
beside the code, such as CONTRIBUTING.md, become pages in docs/project. Neither folder is in git. The build fails if a
link of the finished site leads nowhere.

FEWBITS_DOCS=quick does not execute the tutorials; otherwise their results are kept in build/notebooks until a tutorial
changes.
"""

import os
import shutil
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs"))
import pages  # noqa: E402
from sphinx.errors import SphinxError  # noqa: E402

from fewbits.version import __version__  # noqa: E402

project = "fewbits"
version = release = __version__
author = "The fewbits developers"
html_title = f"fewbits {__version__}"
extensions = ["myst_nb", "sphinx_design"]
exclude_patterns = ["gallery/*/*", "_build"]
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False
highlight_language = "text"
pygments_style, pygments_dark_style = "friendly", "github-dark"

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
nb_execution_mode = "off" if os.environ.get("FEWBITS_DOCS") == "quick" else "cache"
nb_execution_cache_path = str(ROOT / "build" / "notebooks")
nb_execution_raise_on_error = True
nb_execution_timeout = 1200
nb_merge_streams = True
nb_number_source_lines = False


def setup(app: Any) -> None:
    pages.write(ROOT)
    app.connect("source-read", _point_links_into_the_site)
    app.connect("build-finished", _finish)


def _point_links_into_the_site(_app: Any, docname: str, source: list[str]) -> None:
    if not docname.startswith("project/"):  # pages.write has changed the links of these
        source[0] = pages.site_links(source[0], ROOT / "docs" / f"{docname}.md", docname)


def _finish(app: Any, error: Exception | None) -> None:
    if error or app.builder.name != "html":
        return
    for report in (ROOT / "docs" / "gallery").glob("*/"):
        shutil.copytree(report, Path(app.outdir) / "gallery" / report.name, dirs_exist_ok=True)
    if (atlas := ROOT / "docs" / "atlas").is_dir():
        shutil.copytree(atlas, Path(app.outdir) / "atlas", dirs_exist_ok=True)
    if broken := pages.broken_links(Path(app.outdir)):
        raise SphinxError("links that lead nowhere:\n" + "\n".join(broken))
