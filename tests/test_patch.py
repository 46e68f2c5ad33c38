"""patch_jax_nn(): which calls of jax.nn.dot_product_attention it serves, which it leaves, and that it restores."""

import inspect
import threading
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash

ORIGINAL = jax.nn.dot_product_attention
B, T, S, N, K, H = 2, 7, 9, 4, 2, 8


@pytest.fixture(autouse=True)
def _nothing_is_left_patched() -> Iterator[None]:
    yield
    assert jax.nn.dot_product_attention is ORIGINAL


def arrays(dtype: Any = "float32") -> tuple[jax.Array, jax.Array, jax.Array]:
    random = np.random.default_rng(0)
    shapes = (B, T, N, H), (B, S, K, H), (B, S, K, H)
    return tuple(jnp.asarray(random.standard_normal(shape), dtype) for shape in shapes)


def call(*given: Any, **options: Any) -> Any:
    return jax.nn.dot_product_attention(*given, **options)  # looked up anew, as a model does


def is_ours(function: Any, *given: Any) -> bool:
    return "jax_flash_forward" in str(jax.make_jaxpr(function)(*given))


OPTIONS = {
    "plain": {},
    "xla": {"implementation": "xla"},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.3},
    "window": {"local_window_size": (3, 1)},
    "lengths": {"key_value_seq_lengths": jnp.array([5, 9], jnp.int32)},
    "bias": {"bias": jnp.linspace(-1.0, 1.0, N * T * S, dtype=jnp.float32).reshape(1, N, T, S)},
    "mask": {"mask": jnp.arange(S)[None, None, None, :] < 6},
    "residual": {"return_residual": True},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_what_is_served(options: dict[str, Any]) -> None:
    given = arrays()
    with jax.numpy_dtype_promotion("standard"):
        theirs = call(*given, **options)
        assert not is_ours(lambda *x: call(*x, **options), *given)
        with jax_flash.patch_jax_nn() as patch:
            ours = call(*given, **options)
            assert is_ours(lambda *x: call(*x, **options), *given)
    assert patch.served == 2
    assert patch.left == []
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), ours, theirs)


def test_arguments_by_name() -> None:
    q, k, v = arrays()
    with jax_flash.patch_jax_nn() as patch:
        out = call(value=v, key=k, query=q)
    assert patch.served == 1
    np.testing.assert_array_equal(out, jax_flash.dot_product_attention(q, k, v))


LEFT = {
    "integers": (lambda: tuple(x.astype(jnp.int32) for x in arrays()), {}, "int32"),
    "float8": (lambda: tuple(x.astype(jnp.float8_e5m2) for x in arrays()), {}, "float8_e5m2"),
    "complex": (lambda: tuple(x.astype(jnp.complex64) for x in arrays()), {}, "complex64"),
    "a window with a negative side": (arrays, {"local_window_size": (3, -1)}, "local_window_size"),
}


@pytest.mark.filterwarnings("ignore:Casting from complex to real:DeprecationWarning")  # in JAX's own function
@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_is_served_by_jax(name: str) -> None:
    """Calls that this package does not take: results are JAX's, bit by bit, or for 8-bit floats what JAX raises."""
    make, options, reason = LEFT[name]
    given = make()

    def result() -> Any:
        try:
            return np.asarray(call(*given, **options), np.complex128)
        except Exception as error:
            return type(error), str(error)

    with jax.numpy_dtype_promotion("standard"):
        theirs = result()
        with jax_flash.patch_jax_nn() as patch:
            got = result()
    assert patch.served == 0
    assert len(patch.left) == 1
    assert reason in patch.left[0]
    assert isinstance(theirs, tuple) == (name == "float8")
    np.testing.assert_array_equal(got, theirs)


@pytest.mark.parametrize(
    "spoilt",
    [
        {"implementation": "triton"},
        {"implementation": "reference"},  # a name of this package, which jax.nn does not have
        {"query": jnp.zeros((B, T, 3, H))},
        {"key": jnp.zeros((B, S, K, H), jnp.bfloat16)},
        {"mask": jnp.zeros((1, 1, T, S))},
        {"unknown": 1},
    ],
    ids=lambda spoilt: next(iter(spoilt)),
)
def test_errors_are_those_of_jax(spoilt: dict[str, Any]) -> None:
    q, k, v = arrays()
    given = {"query": q, "key": k, "value": v, **spoilt}
    with pytest.raises(Exception) as theirs:  # noqa: PT011
        call(**given)
    with jax_flash.patch_jax_nn() as patch, pytest.raises(type(theirs.value)) as ours:
        call(**given)
    assert str(ours.value) == str(theirs.value)
    assert len(patch.left) == 1


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="a GPU serves it")
def test_cudnn_stays_an_exception_without_a_gpu() -> None:
    given = arrays("bfloat16")
    with pytest.raises(RuntimeError) as theirs:
        call(*given, implementation="cudnn")
    with jax_flash.patch_jax_nn() as patch, pytest.raises(RuntimeError, match="cuDNN") as ours:
        call(*given, implementation="cudnn")
    assert str(ours.value) == str(theirs.value)
    assert "no CUDA device" in patch.left[0]


@pytest.mark.gpu
def test_cudnn_is_served_by_the_kernels() -> None:
    given = arrays("bfloat16")
    with jax_flash.patch_jax_nn() as patch:
        out = call(*given, implementation="cudnn")
    assert patch.served == 1
    np.testing.assert_array_equal(out, jax_flash.attention(*given, implementation="cuda"))


def test_gradients() -> None:
    given = arrays()

    def loss(*given: Any) -> Any:
        return jnp.sin(call(*given, is_causal=True)).sum()

    with jax.numpy_dtype_promotion("standard"):
        theirs = jax.jit(jax.grad(loss, (0, 1, 2)))(*given)
        with jax_flash.patch_jax_nn() as patch:
            ours = jax.jit(jax.grad(loss, (0, 1, 2)))(*given)
    assert patch.served == 1
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), ours, theirs)


def test_as_a_call() -> None:
    patch = jax_flash.patch_jax_nn()
    try:
        assert jax.nn.dot_product_attention is not ORIGINAL
        assert inspect.signature(jax.nn.dot_product_attention) == inspect.signature(ORIGINAL)
        assert repr(patch) == "<jax_flash.patch_jax_nn(): in force, served 0 calls, left 0 to JAX>"
    finally:
        patch.restore()
    assert jax.nn.dot_product_attention is ORIGINAL
    patch.restore()
    assert repr(patch) == "<jax_flash.patch_jax_nn(): restored, served 0 calls, left 0 to JAX>"
    with pytest.raises(RuntimeError, match=r"this patch was restored: call jax_flash\.patch_jax_nn\(\)"), patch:
        pass


def test_an_exception_restores() -> None:
    with pytest.raises(ZeroDivisionError), jax_flash.patch_jax_nn():
        raise ZeroDivisionError
    assert jax.nn.dot_product_attention is ORIGINAL


def test_nesting_in_any_order() -> None:
    given = arrays()
    first, second = jax_flash.patch_jax_nn(), jax_flash.patch_jax_nn()
    call(*given)
    first.restore()  # before the second, which was applied later
    call(*given)
    assert jax.nn.dot_product_attention is not ORIGINAL
    second.restore()
    assert (first.served, second.served) == (1, 2)
    with jax_flash.patch_jax_nn() as outer:
        with jax_flash.patch_jax_nn() as inner:
            call(*given)
        call(*given)
    assert (outer.served, inner.served) == (2, 1)


def test_a_function_that_was_traced_before_is_traced_again() -> None:
    """And takes what it traced without the patch after it."""
    given, traces = arrays(), []
    keeps_both = hasattr(jax.make_user_context(), "set_global")  # else its caches are cleared

    @jax.jit
    def model(*given: Any) -> Any:
        traces.append(jax.nn.dot_product_attention)
        return call(*given)

    with jax_flash.patch_jax_nn():
        pass  # the first patch of a process has every function traced again
    theirs = model(*given)
    assert traces == [ORIGINAL]
    with jax_flash.patch_jax_nn() as patch:
        ours = model(*given)
        model(*given)
    assert patch.served == 1
    np.testing.assert_allclose(ours, theirs, atol=1e-5)
    np.testing.assert_array_equal(model(*given), theirs)
    assert len(traces) == (2 if keeps_both else 3)
    if keeps_both:
        with jax_flash.patch_jax_nn() as again:
            model(*given)
        assert (again.served, len(traces)) == (0, 2)


def test_inside_of_a_function_that_is_traced() -> None:
    given = arrays()

    @jax.jit
    def model(*given: Any) -> Any:
        with jax_flash.patch_jax_nn():
            served = call(*given)
        return served, call(*given)

    served, theirs = model(*given)
    np.testing.assert_array_equal(served, jax.jit(jax_flash.dot_product_attention)(*given))
    np.testing.assert_allclose(served, theirs, atol=1e-5)


def test_a_function_that_was_kept_calls_jax_afterwards() -> None:
    given = arrays()
    with jax_flash.patch_jax_nn() as patch:
        kept = jax.nn.dot_product_attention
    np.testing.assert_array_equal(kept(*given), ORIGINAL(*given))
    assert patch.served == 0


def test_another_patch_of_the_same_name_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def theirs(*given: Any, **options: Any) -> str:
        return "theirs"

    patch = jax_flash.patch_jax_nn()
    with monkeypatch.context() as context:
        context.setattr(jax.nn, "dot_product_attention", theirs)
        patch.restore()
        assert call() == "theirs"
    # It puts back what it found, which is ours and calls JAX's function by now.
    given = arrays()
    np.testing.assert_array_equal(call(*given), ORIGINAL(*given))
    assert not is_ours(call, *given)
    with jax_flash.patch_jax_nn() as patch:
        call(*given)
    assert patch.served == 1


def test_a_function_of_somebody_else_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """And is not called by what is left to JAX: it may itself call what it found."""
    given = tuple(x.astype(jnp.int32) for x in arrays())

    def theirs(*given: Any, **options: Any) -> Any:
        raise AssertionError

    with monkeypatch.context() as context:
        context.setattr(jax.nn, "dot_product_attention", theirs)
        with jax_flash.patch_jax_nn() as patch, jax.numpy_dtype_promotion("standard"):
            call(*given)
        assert len(patch.left) == 1
        assert jax.nn.dot_product_attention is theirs


def test_a_patch_is_one_of_the_process() -> None:
    given, results = arrays(), []
    with jax_flash.patch_jax_nn() as patch:
        thread = threading.Thread(target=lambda: results.append(call(*given)))
        thread.start()
        thread.join()
    assert patch.served == 1
    np.testing.assert_array_equal(results[0], jax_flash.dot_product_attention(*given))


def test_threads_apply_and_restore_at_once() -> None:
    """Each thread's own patch sees all of its calls, and JAX's function is back when all are through."""
    given, failures = arrays(), []
    begin = threading.Barrier(8)
    call(*given)

    def work() -> None:
        try:
            begin.wait()
            for _ in range(50):
                with jax_flash.patch_jax_nn() as patch:
                    assert jax.nn.dot_product_attention is not ORIGINAL
                    call(*given)
                    assert patch.served >= 1  # those of other threads too
                    assert patch.left == []
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert jax.nn.dot_product_attention is ORIGINAL
