"""The measuring process of ``bench compare``, run by path: it imports the build of jax_flash that PYTHONPATH names.

Everything else is the same for both builds: this file and race.py. Of jax_flash it calls only what every build has,
``attention(query, key, value, causal=...)``. It reads requests as lines of JSON and answers each with one: {"take":
task} makes the programs and the arrays of a cell, {"time": n} times n calls of the last one.
"""

import importlib.util
import json
import os
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import IO, TYPE_CHECKING, Any

import jax

if TYPE_CHECKING:
    from jax_flash._tools.bench import race
else:
    _spec = importlib.util.spec_from_file_location("race_of_the_tool", pathlib.Path(__file__).with_name("race.py"))
    race = importlib.util.module_from_spec(_spec)
    sys.modules[_spec.name] = race  # dataclasses look their module up there
    _spec.loader.exec_module(race)

Maker = Callable[[Sequence[jax.Array]], race.Entry]


def imported(folder: str) -> Any:
    """jax_flash from a folder, which PYTHONPATH has first."""
    # An editable installation has a finder of its own, which precedes those that search PYTHONPATH.
    for finder in list(sys.meta_path):
        spec = finder.find_spec("jax_flash", None)
        if spec is not None and not (spec.origin or "").startswith(folder + os.sep):
            sys.meta_path.remove(finder)
    import jax_flash

    return jax_flash


class Worker:
    """The cell that is measured, and the programs made so far."""

    def __init__(self, attention: Callable[..., Any]) -> None:
        self._attention = attention
        self._makers: dict[str, Maker] = {}
        self._entry: race.Entry | None = None

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        try:
            if "take" in question:
                self._take(question["take"])
                return {}
            assert self._entry is not None
            # One call to warm up: the caches hold the data of processes that have run since.
            race.timed(self._entry, 1)
            return {"seconds": race.timed(self._entry, question["time"])}
        except Exception as error:  # a build that does not serve a cell
            lines = str(error).splitlines()
            return {"error": f"{type(error).__name__}: {lines[0] if lines else ''}"}

    def _take(self, task: dict[str, Any]) -> None:
        cell, pass_, chained = race.Cell(**task["cell"]), task["pass_"], task["chained"]
        self._entry = None  # frees its arrays first
        name = json.dumps(task)
        if name not in self._makers:
            make = self._chain if chained else race.of_jax
            self._makers[name] = make(self._attend, cell, pass_)
        entry = self._makers[name](cell.draw())
        if jax.default_backend() == "cpu":  # where queued calls may run concurrently
            entry = _one_at_a_time(entry)
        self._entry = entry
        race.timed(entry, 1)  # compiles

    def _attend(self, query: Any, key: Any, value: Any, causal: bool) -> Any:
        return self._attention(query, key, value, causal=causal)

    @staticmethod
    def _chain(attend: race.Attend, cell: race.Cell, pass_: str) -> Maker:
        run = jax.jit(race.chain(attend, cell, pass_))
        return lambda arrays: race.Entry(lambda: run(*arrays[:3]), jax.block_until_ready)


def _one_at_a_time(entry: race.Entry) -> race.Entry:
    return race.Entry(lambda: entry.wait(entry.start()), lambda _: None)


def main(folder: str, answers: IO[str]) -> None:
    """Answers requests until there are no more."""

    def say(answer: dict[str, Any]) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    jax_flash = imported(folder)
    device = jax.devices()[0]
    say({"file": jax_flash.__file__, "platform": device.platform, "device": device.device_kind, "jax": jax.__version__})
    worker = Worker(jax_flash.attention)
    for line in sys.stdin:
        say(worker.answer(json.loads(line)))


if __name__ == "__main__":
    # Other output must not get between the answers.
    with os.fdopen(os.dup(1), "w") as answers_:
        os.dup2(2, 1)
        main(sys.argv[1], answers_)
