"""What the site adds to the repository's own pages: the files beside docs/ as pages, links that fit, and the public API.

Pages are written to be read in the repository; here their links are moved to where the site has the same thing.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import fedsieve

PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
SOURCES = {page: source for source, page in PAGES.items()}
FOLDERS = ("examples/*.py", "configs/*.yaml")
RECIPE = re.compile(r"^\*\*([^*]+)\.\*\* ", re.M)
LINK = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig, **_: Any) -> Files:
    """Take along what lies beside docs/."""
    root = Path(config.config_file_path).parent
    for source, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(root / source)))
    for file in (file for pattern in FOLDERS for file in sorted(root.glob(pattern))):
        files.append(File.generated(config, file.relative_to(root).as_posix(), abs_src_path=str(file)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Move links, give recipes headings, and write the API down where its page ends."""
    here = page.file.src_uri
    source = SOURCES.get(here, f"docs/{here}")

    def moved(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link[1]))
        place = PAGES.get(target, target.removeprefix("docs/"))
        return f"]({posixpath.relpath(place, posixpath.dirname(here) or '.')}{link[2] or ''})"

    if page.parent is None:
        page.meta["hide"] = ["navigation"]  # a page without neighbours needs no list of them
    if here == "how-to.md":
        markdown = RECIPE.sub(r"## \1\n\n", markdown)  # so that they can be found and linked to
    if here == "api.md":
        markdown += "".join(f"\n\n::: fedsieve.{name}\n" for name in fedsieve.__all__)
    return LINK.sub(moved, markdown)
