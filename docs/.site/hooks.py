"""Hooks of mkdocs.yml: the site also has the files of the repository outside docs/ that its pages link to.

Each SVG picture of docs/images has a dark version in the site, which replaces the colours of `DARK`; a page shows the
one that fits its colours. The repository has the light ones only.

A file keeps its path in the repository, but for docs/, which is the root of the site: links between both are rewritten
for that, so that the same links work in the repository and in the site. What the site does not have (folders, sources
in other languages) is shown without a link.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("CHANGELOG.md", "CONTRIBUTING.md", "examples/README.md")
IMAGE = re.compile(r"!\[([^\]]*)\]\(([^)\s:]+)\.svg\)")
DARK = {
    "#ffffff": "#15181c",
    "#1b1f24": "#e6e9ec",
    "#d5d9de": "#363c44",
    "#6a737d": "#9aa3ad",
    "#0072b2": "#56b4e9",
    "#d55e00": "#ff9248",
    "#007d5c": "#3fd0a4",
    "#b0508a": "#e59cc8",
    "#b07a00": "#f0bd4a",
    "#6b4fc0": "#b3a1f5",
    "#4a5560": "#b7c0c9",
    "#8a6d3b": "#d8bf8c",
    "#5c6670": "#a9b3bd",
}
"""The colour on dark ground, by the colour on light ground; those of jax_flash/_tools/plots.py."""
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s:]+?)(#[^)\s]*)?\)")


def dark(svg: str) -> str:
    return re.sub(r"#[0-9a-f]{6}\b", lambda colour: DARK.get(colour[0], colour[0]), svg)


def on_files(files: Any, config: Any) -> Any:
    found = (path for part in ("*.py", "*.ipynb", "integrations/*.py") for path in ROOT.glob(f"examples/{part}"))
    sources = [path.relative_to(ROOT).as_posix() for path in found]
    for path in (*PAGES, *sources):
        files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    for picture in ROOT.glob("docs/images/*.svg"):
        name = f"images/{picture.stem}-dark.svg"
        files.append(File.generated(config, name, content=dark(picture.read_text(encoding="utf-8"))))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    here = page.file.src_uri
    in_repository = here if here in PAGES else f"docs/{here}"

    def rewritten(link: re.Match[str]) -> str:
        text, target, anchor = link[1], link[2], link[3] or ""
        path = posixpath.normpath(posixpath.join(posixpath.dirname(in_repository), target))
        if not (ROOT / path).exists():
            return link[0]  # MkDocs warns
        if (ROOT / path).is_dir():
            path = posixpath.join(path, "README.md")
        path = "index.md" if path == "README.md" else path.removeprefix("docs/")
        if files.get_file_from_path(path) is None:
            return text
        return f"[{text}]({posixpath.relpath(path, posixpath.dirname(here) or '.')}{anchor})"

    markdown = IMAGE.sub(r"![\1](\2.svg#only-light)![\1](\2-dark.svg#only-dark)", markdown)
    return LINK.sub(rewritten, markdown)
