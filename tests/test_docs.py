"""The documentation: its code runs, and its links lead to files that exist."""

import ast
import contextlib
import functools
import importlib.util
import io
import os
import pathlib
import re
from typing import Any

import jax
import pytest

from jax_flash._tools import plots

os.environ.setdefault("KERAS_BACKEND", "jax")  # read when Keras is imported
ROOT = pathlib.Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
NEEDS = {"integrations/equinox.md": "equinox", "integrations/keras.md": "keras"}
"""What the blocks of a page import that may not be installed."""
IN_TURN = (
    "../README.md",
    "context.md",
    "flex.md",
    "index.md",
    "tutorial.md",
    "transformations.md",
    "migrating.md",
    *(path.relative_to(ROOT / "docs").as_posix() for path in PAGES if path.parent.name == "integrations"),
)
"""The pages whose blocks of Python run one after another; those of recipes.md run each by itself."""
GIVEN = {
    "context.md": """
import jax, jax.numpy as jnp
tokens = jnp.arange(128).reshape(2, 64)
query, key, value = (jax.random.normal(jax.random.key(i), (2, 64, 4, 8)) for i in range(3))
""",
    "flex.md": """
import jax, jax.numpy as jnp
B, T, S = 2, 32, 32
query, key, value = (jax.random.normal(jax.random.key(i), (B, T, 4, 8)) for i in range(3))
table, ids = jnp.zeros((4, T + S)), jnp.zeros((B, S), jnp.int32)
""",
    "transformations.md": """
import jax, jax.numpy as jnp
import jax_flash
from jax_flash import attention, explain
x = query = key = value = jax.random.normal(jax.random.key(0), (2, 16, 4, 8))
def block(x):
    return x + attention(x, x, x, causal=True)
f = block
""",
}
"""What the blocks of a page take for granted, where they are parts of a program."""
DARK = next(  # the hooks import MkDocs
    ast.literal_eval(node.value)
    for node in ast.parse((ROOT / "docs/.site/hooks.py").read_text(encoding="utf-8")).body
    if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "DARK"
)
MESSAGES = re.findall(r"^\| `(.+?)` \| ", (ROOT / "docs/troubleshooting.md").read_text(), flags=re.MULTILINE)


def _blocks(page: str) -> list[tuple[str, str | None]]:
    """The blocks of Python of a page, and the output that follows each if the page shows one.

    Each is behind as many empty lines as make the line numbers of errors right.
    """
    text = (ROOT / "docs" / page).read_text()
    pattern = r"^```python\n(.*?)^```$(?:[^`]*?\n\n```text\n(.*?)^```$)?"
    found = re.finditer(pattern, text, flags=re.DOTALL | re.MULTILINE)
    return [("\n" * text.count("\n", 0, block.start(1)) + block[1], block[2]) for block in found]


def _run(page: str, block: str, names: dict[str, object]) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(block, str(ROOT / "docs" / page), "exec"), names)
    return printed.getvalue()


@pytest.mark.usefixtures("as_an_example_runs")
@pytest.mark.parametrize("number", range(len(_blocks("recipes.md"))))
def test_recipes_run(number: int) -> None:
    _run("recipes.md", _blocks("recipes.md")[number][0], {})


@pytest.mark.usefixtures("as_an_example_runs")
@pytest.mark.parametrize("page", IN_TURN)
def test_pages_run(page: str) -> None:
    if page in NEEDS:
        pytest.importorskip(NEEDS[page], reason=f'{NEEDS[page]} is not installed: pip install ".[test]"')
    names: dict[str, object] = {}
    exec(GIVEN.get(page, ""), names)
    for block, output in _blocks(page):
        printed = _run(page, block, names)
        if output is not None and jax.default_backend() == "cpu":  # explain() says another thing on a GPU
            assert printed == output


def test_every_block_is_run() -> None:
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in PAGES if "```python" in path.read_text()}
    assert pages - {"recipes.md", *IN_TURN} == set()


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_links_lead_to_files(page: pathlib.Path) -> None:
    """`./run docs` checks the anchors."""
    links = re.findall(r"\]\(([^)\s#]+)(?:#[^)\s]*)?\)", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL))
    dead = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not dead


def _of_site(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / ".site" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PLOTS = _of_site("plots")


@pytest.mark.parametrize("name", PLOTS.FIGURES)
def test_plots_show_what_the_tables_say(name: str) -> None:
    """If not: python docs/.site/plots.py"""
    data = PLOTS.figures()[name]
    assert PLOTS.shown((ROOT / "docs/images" / f"{name}.svg").read_text(encoding="utf-8")) == data
    values = [x for part in data.values() if isinstance(part, dict) for x in part.values()]
    assert values
    assert all(len(x) == len(data["labels"]) > 2 for x in values)


@pytest.mark.parametrize("path", sorted((ROOT / "docs/images").glob("*.svg")), ids=lambda path: path.stem)
def test_pictures_have_dark_versions(path: pathlib.Path) -> None:
    """hooks.py knows each colour of a picture, and a picture has no other way to say one."""
    colours = set(re.findall(r"#[0-9a-fA-F]{6}\b", text := path.read_text(encoding="utf-8")))
    assert "#ffffff" in colours
    assert colours <= set(DARK)
    assert not re.search(r"(?:fill|stroke)[:=] ?\"?(?:black|white|rgb|#[0-9a-f]{3}\b)", text)
    assert len(text) < 140_000  # 26 rows of the document on V100s have as much


def test_dark_colours_are_those_of_reports() -> None:
    assert plots.dark() == DARK


@functools.cache
def _sources() -> str:
    """The package's Python with the parts of a string that stand on lines of their own joined."""
    text = "".join(path.read_text() for path in sorted((ROOT / "jax_flash").rglob("*.py")))
    return re.sub(r"(?<!\")\"\s*\n\s*f?\"(?!\")", "", text).replace("\\'", "'")


@pytest.mark.parametrize("message", MESSAGES)
def test_messages_are_those_of_the_source(message: str) -> None:
    """In order, with anything short between the parts that the page gives."""
    parts = [re.escape(part.strip()) for part in message.split("...") if part.strip(" :,;.[]")]
    assert re.search("[^\\n]{0,200}?".join(parts), _sources())
