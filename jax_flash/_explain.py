"""`explain`: which implementation serves a call, in a form to read."""

import dataclasses
import html
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack

import jax
import numpy as np

from jax_flash._attention import Padded, Shared, attention, attention_varlen
from jax_flash._call import checks, dtypes
from jax_flash._call.options import UNLIMITED, Options
from jax_flash._call.signature import with_signature
from jax_flash._context import choice as _context
from jax_flash._context.choice import place_of
from jax_flash._context.run import sizes_of
from jax_flash._functions import arguments as _functions
from jax_flash._functions import cpu, cuda
from jax_flash._functions.trace import Functions
from jax_flash._implementations import choice
from jax_flash._native import registration
from jax_flash._native import tuned as _tuned

PLATFORMS = ("cpu", "cuda", "gpu", "rocm", "tpu")
"""The values of explain()'s ``platform``. Plugins add other platforms to JAX, which its default device may be on."""


@dataclasses.dataclass(frozen=True)
class Explanation:
    """Which implementation serves a call.

    Attributes:
      implementation: the name of the one that serves it.
      platform: the platform that the answer is for.
      obstacles: for every implementation that can't serve it, the reason.
      tuned: tile rows of ``bench tune --store`` for this GPU and head_dim: calls with no option but ``causal`` and
        ``deterministic_backward`` use them instead of the table's.
      split: if the query is sharded over devices, which of its shardings the kernels keep and what is gathered.
      source: with ``source=True``, what the platform's kernels have of ``score_mod``, ``mask_mod`` and ``block_mask``:
        what CUDA's are compiled with, or what a CPU's evaluate; "" if there are none, or if they can't be printed, for
        which ``obstacles`` has the reason.
      gradients: why the backward pass is served by "xla" although the forward is not, where it is: that of gradients of
        arrays that ``score_mod`` captured; "" if both are served alike.
      context: with ``context``, which schedule serves the call and why others can't, what travels and how many bytes
        each device sends, and which options of XLA's compiler would hide that behind the kernels but are off.
    """

    implementation: str
    platform: str
    obstacles: dict[str, str]
    tuned: tuple[str, ...] = ()
    split: tuple[str, ...] = ()
    source: str = ""
    gradients: str = ""
    context: tuple[str, ...] = ()

    def _verdicts(self) -> list[tuple[str, str]]:
        """Every implementation, and whether it serves the call."""
        found: list[tuple[str, str]] = []
        for name in choice.IMPLEMENTATIONS:
            if name in self.obstacles:
                found.append((name, f"no, {self.obstacles[name]}"))
            else:
                found.append((name, "yes" if name == self.implementation else "could, when asked for by name"))
        return found

    def _notes(self) -> list[tuple[str, str]]:
        """What there is to say besides, with its title."""
        notes = [("tuned", row) for row in self.tuned] + [("split", part) for part in self.split]
        if self.gradients:
            notes.append(("gradients of captured arrays", f"by 'xla', {self.gradients}"))
        return notes + [("context", part) for part in self.context]

    @property
    def _title(self) -> str:
        return f"on {self.platform}, attention is served by {self.implementation!r}"

    def __str__(self) -> str:
        lines = [self._title, *(f"  {title}: {text}" for title, text in (*self._verdicts(), *self._notes()))]
        return "\n".join([*lines, *([self.source] if self.source else [])])

    def __repr__(self) -> str:
        """What an interactive Python shows: a table in a terminal, if rich is installed, else the text."""
        if not sys.stdout.isatty() or importlib.util.find_spec("rich") is None:
            return str(self)
        import rich.console

        console = rich.console.Console()
        with console.capture() as captured:
            console.print(self)
        return captured.get().rstrip("\n")

    def __rich__(self) -> Any:
        """The table that rich prints."""
        import rich.box
        import rich.console
        import rich.table
        import rich.text

        grid = rich.table.Table(title=self._title, title_justify="left", box=rich.box.SIMPLE, show_header=False)
        grid.add_column(style="bold", no_wrap=True)
        grid.add_column()
        styles = {"yes": "green", "could": "", "no": "yellow"}
        for name, verdict in self._verdicts():
            grid.add_row(name, rich.text.Text(verdict, style=styles[verdict.split(",")[0]]))
        if self._notes():
            grid.add_section()
        for title, text in self._notes():
            grid.add_row(title, rich.text.Text(text))
        return rich.console.Group(grid, rich.text.Text(self.source)) if self.source else grid

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        cell = '<td style="text-align: left">'
        rows = [
            f"<tr>{cell}<b>{html.escape(title)}</b></td>{cell}{html.escape(text)}</td></tr>"
            for title, text in (*self._verdicts(), *self._notes())
        ]
        source = f"<pre>{html.escape(self.source)}</pre>" if self.source else ""
        return f"<table><caption>{html.escape(self._title)}</caption><tbody>{''.join(rows)}</tbody></table>{source}"


class _OfAttention(Padded, total=False):
    return_lse: bool


class _OfVarlen(Shared, total=False):
    return_lse: bool


def _and_own(function: Callable[..., object]) -> list[inspect.Parameter]:
    """The parameters of a function, and those of its explanation."""
    own = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)
        for name, default in (("platform", None), ("source", False))
    ]
    return [*inspect.signature(function).parameters.values(), *own]


@with_signature(_and_own(attention))
def explain(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    platform: str | None = None,
    source: bool = False,
    **options: Unpack[_OfAttention],
) -> Explanation:
    """Says which implementation serves ``attention(query, key, value, ...)``, and why not the others.

    Takes the arguments of `attention`, checks them the same way and computes nothing; any array may be a
    ``jax.ShapeDtypeStruct``. The result prints as text; it is a table where rich shows it, as in an interactive Python
    in a terminal, and in a notebook.

    Args:
      query: as for `attention`, ``[..., T, N, H]``; likewise ``key`` and ``value``. Its sharding, if it has one, says
        over which devices the call is to be split.
      key: see ``query``.
      value: see ``query``.
      bias: as for `attention`.
      mask: as for `attention`.
      platform: "cpu", "cuda" (or "gpu", which means it), "rocm" or "tpu"; None means that of JAX's default device.
      source: also say what kernels are compiled with, or evaluate, of ``score_mod``, ``mask_mod`` and ``block_mask``.
      **options: the other keyword arguments of `attention`.

    Raises:
      TypeError, ValueError, NotImplementedError: as `attention`.
    """
    arguments = {"bias": bias, "mask": mask, **options}
    return _explained(attention, (query, key, value), arguments, platform, source)


@with_signature(_and_own(attention_varlen))
def explain_varlen(
    query: Any,
    key: Any,
    value: Any,
    cu_q_lengths: Any,
    cu_kv_lengths: Any,
    max_q_length: int | None = None,
    max_kv_length: int | None = None,
    *,
    platform: str | None = None,
    source: bool = False,
    **options: Unpack[_OfVarlen],
) -> Explanation:
    """Says which implementation serves ``attention_varlen(query, key, value, cu_q_lengths, ...)``: see `explain`.

    Args:
      query: as for `attention_varlen`, ``[tokens, N, H]``, or a ``jax.ShapeDtypeStruct``, as every array may be.
      key: see ``query``.
      value: see ``query``.
      cu_q_lengths: as for `attention_varlen`.
      cu_kv_lengths: likewise.
      max_q_length: likewise.
      max_kv_length: likewise.
      platform: see `explain`.
      source: see `explain`.
      **options: the other keyword arguments of `attention_varlen`.

    Raises:
      TypeError, ValueError, NotImplementedError: as `attention_varlen`.
    """
    arguments = {
        "cu_q_lengths": cu_q_lengths,
        "cu_kv_lengths": cu_kv_lengths,
        "max_q_length": max_q_length,
        "max_kv_length": max_kv_length,
        **options,
    }
    return _explained(attention_varlen, (query, key, value), arguments, platform, source)


def _explained(
    function: Callable[..., Any], inputs: Sequence[Any], options: Mapping[str, Any], platform: str | None, source: bool
) -> Explanation:
    """Of a call of ``function``, with query, key and value as ``inputs`` and all other arguments by name."""
    functions = _traced(function, inputs, options)
    query, key, _ = inputs
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs]
    precise = checks.highest_precision(options.get("precision"), shapes[0].dtype)
    implementation = options.get("implementation")
    if platform is None:
        # A device, the name of a platform, or None; JAX defines this setting at run time, so type checkers don't know
        # it.
        device = jax.config.jax_default_device  # type: ignore[attr-defined]
        platform = getattr(device, "platform", device) or jax.default_backend()
    elif platform not in PLATFORMS:
        raise ValueError(f"platform must be None or one of {', '.join(PLATFORMS)}, got {checks.describe(platform)}")
    platform = "cuda" if platform == "gpu" else platform
    place = place_of(options.get("context"))
    schedule = "" if place is None else _schedule(place, shapes, options)
    alibi = options.get("alibi_slopes") is not None and functions is None
    if place is not None and alibi and _context.relocates(schedule, place.context.order):
        functions, _ = _functions.functions_of(  # such a score function ALiBi becomes
            _functions.Arguments(lambda score, b, h, q, kv: score - abs(q - kv).astype(score.dtype)),
            dtypes.accumulation_dtype(shapes[0].dtype),
            (1, 1, 1, 1),
            0,
        )
    call = choice.Call(np.dtype(shapes[0].dtype).name, shapes[0].shape[-1], shapes[2].shape[-1], precise, functions)
    obstacles: dict[str, str] = {
        name: reason for name in choice.IMPLEMENTATIONS if (reason := choice.obstacle(name, platform, call))
    }
    tuned: tuple[str, ...] = ()
    chosen = choice.choose(implementation, platform, call)
    if chosen == "cuda" and choice.has_gpu() and call.head_dim == call.value_head_dim:
        tuned = tuple(map(str, _tuned.in_use(registration.cuda_status()["devices"], call.head_dim)))
    split = _split(query, key, options) if chosen in choice.KERNELS else ()
    printed = ""
    printer: Any = cpu if platform == "cpu" else cuda
    if checks.boolean("source", source) and functions is not None and printer.unprintable(functions) is None:
        printed = printer.source(functions, derives=True)
    context: tuple[str, ...] = ()
    if place is not None:
        context, split = _of_context(place, schedule, shapes, options, platform), ()
    gradients = _of_gradients(chosen, platform, call, options)
    return Explanation(chosen, platform, obstacles, tuned, split, printed, gradients, context)


def _traced(function: Callable[..., Any], inputs: Sequence[Any], options: Mapping[str, Any]) -> Functions | None:
    """Traces the call, so that its own checks are made, and returns its score and mask functions."""
    shapes = {
        name: x
        for name, x in options.items()
        if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(x))
    }
    known = {name: x for name, x in options.items() if name not in shapes}
    found: list[Functions | None] = []

    def call(arrays: Sequence[Any], traced: Mapping[str, Any]) -> None:
        given = {**known, **traced}
        function(*arrays, **given)
        query, key, _ = arrays
        if function is attention_varlen:
            sizes = (np.shape(given["cu_q_lengths"])[0] - 1, query.shape[-2])
            limits = [given["max_q_length"], given["max_kv_length"]]
        else:
            sizes, limits = (math.prod(query.shape[:-3]), query.shape[-2]), [None, None]
        lengths = [x.shape[-3] if limit is None else limit for x, limit in zip((query, key), limits, strict=True)]
        functions, _ = _functions.functions_of(
            _functions.Arguments(*(given.get(name) for name in _functions.Arguments._fields)),
            dtypes.accumulation_dtype(query.dtype),
            (*sizes, *lengths),
            given.get("q_offset", 0),
            packed=function is attention_varlen,
        )
        found.append(functions)

    # What is no array stays as it is, for the function to refuse.
    outlines = [jax.ShapeDtypeStruct(x.shape, x.dtype) if hasattr(x, "shape") else x for x in inputs]
    if all(isinstance(x, jax.ShapeDtypeStruct) for x in outlines):
        jax.eval_shape(call, outlines, shapes)
    else:
        call(outlines, shapes)
    return found[0]


def _of_gradients(chosen: str, platform: str, call: choice.Call, options: Mapping[str, Any]) -> str:
    """Why gradients of captured arrays are not served as the call is; "" if they are."""
    if chosen not in choice.KERNELS or call.functions is None or call.functions.score is None:
        return ""
    score, deterministic = call.functions.score, options.get("deterministic_backward")
    floats = [
        i
        for i, x in zip(score.captured, score.jaxpr.invars, strict=False)
        if jax.numpy.issubdtype(x.aval.dtype, np.floating)
    ]
    call = dataclasses.replace(
        call,
        gradients=tuple(floats),
        deterministic=choice.deterministic_by_default() if deterministic is None else deterministic,
    )
    return choice.obstacle(chosen, platform, call) or ""


def _schedule(place: _context.Place, shapes: Sequence[jax.ShapeDtypeStruct], options: Mapping[str, Any]) -> str:
    return _context.chosen(place, _sizes(place, shapes), _record(options))[0]


def _record(options: Mapping[str, Any]) -> Options:
    """What a schedule depends on of the options of a call."""
    window = options.get("window")  # checked already; its sides may be arrays, or their shapes
    sides = window if isinstance(window, (tuple, list)) else (window, window)
    left, right = (int(x) if isinstance(x, (int, np.integer)) else UNLIMITED for x in sides)
    return Options(
        causal=options.get("causal", False),
        scale=1.0,
        dropout_rate=float(options.get("dropout_rate", 0.0)),
        window_left=left,
        window_right=right,
    )


def _sizes(place: _context.Place, shapes: Sequence[jax.ShapeDtypeStruct]) -> _context.Sizes:
    return sizes_of(place, *(jax.ShapeDtypeStruct((1, *x.shape[-3:]), x.dtype) for x in shapes))


def _of_context(
    place: _context.Place,
    schedule: str,
    shapes: Sequence[jax.ShapeDtypeStruct],
    options: Mapping[str, Any],
    platform: str,
) -> tuple[str, ...]:
    sizes, batch, order = _sizes(place, shapes), math.prod(shapes[0].shape[:-3]), place.context.order
    offset = options.get("q_offset", 0)
    shifted = "cu_q_lengths" in options or not (isinstance(offset, (int, np.integer)) and offset == 0)
    in_reach = _context.shards_in_reach(
        order, place.devices, sizes.q_length, sizes.kv_length, _record(options), shifted
    )
    found = _context.travels(schedule, place.devices, sizes, shapes[0].dtype.itemsize, batch, in_reach)
    lines = [
        f"schedule {schedule!r} over {place.devices} devices along {place.context.axis!r}, order {order!r}",
        f"{_context.TRAVELLING[schedule]}: {_bytes(found['forward'])} sent by each device in the forward pass, "
        f"{_bytes(found['backward'])} in the backward pass, if no other mesh axis splits the call",
        *(f"{name}: no, {reason}" for name, reason in _context.obstacles(place, sizes, _record(options)).items()),
    ]
    if options.get("alibi_slopes") is not None and _context.relocates(schedule, order):
        lines.append(f"alibi_slopes become a score_mod with schedule {schedule!r} and order {order!r}")
    if platform == "cuda" and (missing := _context.overlap_is_off()):
        lines.append(
            f"communication may not overlap with the kernels: {missing} is off "
            "(jax_flash.context.set_overlap_flags sets it)"
        )
    return tuple(lines)


def _bytes(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"


def _split(query: Any, key: Any, options: Mapping[str, Any]) -> tuple[str, ...]:
    sharding = getattr(query, "sharding", None)
    if not isinstance(sharding, jax.sharding.NamedSharding) or sharding.mesh.size == 1 or query.ndim < 4:
        return ()
    from jax_flash._primitive import partitioning  # imported here, since jax may lack the names it needs

    return partitioning.described(sharding, query.shape, key.shape[-2], dropout=bool(options.get("dropout_rate")))
