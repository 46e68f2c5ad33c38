"""Hooks of mkdocs.yml: the site also has the files of the repository outside docs/ that its pages link to.

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
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s:]+?)(#[^)\s]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    found = (path for part in ("*.py", "*.ipynb", "integrations/*.py") for path in ROOT.glob(f"examples/{part}"))
    sources = [path.relative_to(ROOT).as_posix() for path in found]
    for path in (*PAGES, *sources):
        files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
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

    return LINK.sub(rewritten, markdown)
