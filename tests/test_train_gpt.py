"""The example trains: the same under every implementation, through interruptions, and it generates by its cache."""

import csv
import dataclasses
import importlib.util
import pathlib
import signal
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

PATH = pathlib.Path(__file__).parents[1] / "examples" / "train_gpt.py"
SMALL = [
    *("--layers", "2", "--width", "32", "--heads", "4", "--kv-heads", "2", "--length", "64", "--batch", "4"),
    *("--dtype", "float32", "--learning-rate", "0.01", "--sample", "0"),
]
pytestmark = pytest.mark.usefixtures("as_an_example_runs")
IMPLEMENTATIONS = ["reference", "xla", *(["cpu"] if jax.default_backend() == "cpu" else [])]
needs_cpu = pytest.mark.skipif(
    jax.default_backend() != "cpu", reason="compares with the CPU kernel: JAX runs elsewhere"
)


@pytest.fixture(scope="module")
def gpt():
    spec = importlib.util.spec_from_file_location("train_gpt", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def losses(folder):
    with (folder / "losses.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == list(range(1, len(rows) + 1))
    train = np.array([float(row["train"]) for row in rows])
    return train, {int(row["step"]): float(row["validation"]) for row in rows if row["validation"]}


@pytest.mark.slow
@needs_cpu
def test_cpu_and_reference_learn_the_same(gpt, tmp_path, capsys):
    curves = {}
    for name in ("cpu", "reference"):
        flags = ["--implementation", name, "--steps", "100", "--out", str(tmp_path / name)]
        assert gpt.main([*SMALL, *flags]) == 0
        assert f"attention is served by {name!r}" in capsys.readouterr().out
        curves[name], validation = losses(tmp_path / name)
        assert validation.keys() == {100}
        assert (tmp_path / name / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert curves["cpu"].shape == (100,)
    np.testing.assert_allclose(curves["cpu"], curves["reference"], rtol=0, atol=1e-3)
    # It knows nothing at first, and after 100 steps of a model this small, which bytes are frequent.
    assert abs(curves["cpu"][0] - np.log(256)) < 1
    assert curves["cpu"][-20:].mean() < 3.4


@needs_cpu
@pytest.mark.parametrize(("name", "calls"), [("cpu", True), ("reference", False), ("xla", False)])
def test_the_step_calls_the_kernel_that_was_asked_for(gpt, name, calls):
    config = small_config(gpt)
    graphdef, state = gpt.initial_state(config, name)
    text = jnp.zeros(1000, jnp.uint8)
    lowered = gpt.make_train_step(graphdef, config).lower(state, text).as_text()
    assert ("jax_flash_forward" in lowered) == calls
    assert ("jax_flash_backward" in lowered) == calls


@pytest.mark.slow
def test_resumed_after_ctrl_c_it_learns_as_if_never_stopped(gpt, tmp_path, monkeypatch, capsys):
    flags = [*SMALL, "--steps", "24", "--log-every", "5", "--eval-every", "8"]
    assert gpt.main([*flags, "--out", str(tmp_path / "straight")]) == 0

    class Interrupted(gpt.tqdm):
        def update(self, n=1):
            super().update(n)
            if signal.getsignal(signal.SIGINT) is not handler:  # that is, the first time
                signal.raise_signal(signal.SIGINT)

    handler = signal.getsignal(signal.SIGINT)
    out = str(tmp_path / "stopped")
    with monkeypatch.context() as patch:
        patch.setattr(gpt, "tqdm", Interrupted)
        assert gpt.main([*flags, "--out", out]) == 130
    assert signal.getsignal(signal.SIGINT) is handler
    assert f"--resume --out {out}" in capsys.readouterr().out
    assert losses(tmp_path / "stopped")[0].shape == (6,)  # the bar moves first at step 5; the next step notices

    # From here the checkpoint speaks for model, batch and seed.
    assert gpt.main(["--resume", "--out", out, "--log-every", "5", "--eval-every", "8", "--sample", "0"]) == 0
    assert "at step 6" in capsys.readouterr().out
    for straight, stopped in zip(losses(tmp_path / "straight"), losses(tmp_path / "stopped"), strict=True):
        np.testing.assert_equal(straight, stopped)


@pytest.mark.slow
def test_resumed_with_more_steps_and_newest_by_default(gpt, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert gpt.main([*SMALL, "--steps", "3", "--seed", "5"]) == 0
    assert gpt.main(["--resume", "--steps", "5", "--sample", "20", "--prompt", "import "]) == 0
    assert "20 bytes after 'import '" in capsys.readouterr().out
    run = tmp_path / "runs" / "tiny-1"
    train, validation = losses(run)
    assert train.shape == (5,)
    assert validation.keys() == {3, 5}
    assert (run / "sample.txt").read_text(encoding="utf-8").startswith("import ")

    for flags, message in [
        (["--seed", "6"], "--seed 6 contradicts the run to resume, which has 5"),
        (["--width", "64"], "--width 64 contradicts the run to resume, which has 32"),
        (["--preset", "small"], "--preset can't go with --resume"),
        (["--steps", "4"], "--steps must be at least the 5 steps"),
    ]:
        assert message in error_of(gpt, capsys, ["--resume", *flags])
    assert "already holds a run" in error_of(gpt, capsys, ["--out", str(run)])
    monkeypatch.setattr(gpt, "standard_library", lambda: gpt.Text(np.arange(200, dtype=np.uint8), np.arange(99) > 0))
    assert "this one's standard library differs" in error_of(gpt, capsys, ["--resume"])


def test_bfloat16_learns(gpt, tmp_path):
    flags = ["--steps", "40", "--dtype", "bfloat16", "--out", str(tmp_path)]
    assert gpt.main([*SMALL, *flags]) == 0
    train, _ = losses(tmp_path)
    assert train[-10:].mean() < 3.6


@pytest.mark.slow
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_cached_logits_are_those_of_a_whole_pass(gpt, implementation):
    model = gpt.GPT(small_config(gpt), implementation, rngs=nnx.Rngs(1))
    tokens = jax.random.randint(jax.random.key(2), (3, 12), 0, 256)
    whole, _ = model(tokens)
    assert whole.std() > 0.05

    caches = model.empty_caches(3, 16)  # with room to spare, which the mask must hide
    step = jax.jit(lambda tokens, position, caches: model(tokens, position, caches))
    parts = []
    for start, stop in [(0, 5), (5, 6), (6, 7), (7, 11), (11, 12)]:
        logits, caches = step(tokens[:, start:stop], start, caches)
        parts.append(logits)
    np.testing.assert_allclose(jnp.concatenate(parts, axis=1), whole, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("count", [1, 15])
def test_generated_bytes_are_the_likeliest_of_a_whole_pass(gpt, implementation, count):
    model = gpt.GPT(small_config(gpt), implementation, rngs=nnx.Rngs(3))
    graphdef, params = nnx.split(model)
    prompt = jnp.asarray([[5, 200, 7], [0, 1, 255]], jnp.uint8)
    generated = gpt.generate(graphdef, params, prompt, jax.random.key(0), count=count, temperature=0.0)
    assert generated.shape == (2, count)
    assert generated.dtype == jnp.uint8

    tokens = jnp.concatenate([prompt, generated], axis=1)
    logits, _ = model(tokens[:, :-1])
    np.testing.assert_array_equal(generated, logits[:, 2:].argmax(axis=-1))


def test_sampling_follows_key_and_temperature(gpt):
    graphdef, params = nnx.split(gpt.GPT(small_config(gpt), rngs=nnx.Rngs(3)))
    prompt = jnp.asarray([[5, 200, 7]], jnp.uint8)

    def sample(seed, temperature):
        key = jax.random.key(seed)
        return gpt.generate(graphdef, params, prompt, key, count=20, temperature=temperature).tolist()

    assert sample(0, 1.0) == sample(0, 1.0)
    assert sample(0, 1.0) != sample(1, 1.0)
    assert sample(0, 1e-4) == sample(1, 0.0)


def test_text_is_split_by_file_and_the_same_each_time(gpt):
    text = gpt.standard_library()
    assert text.fingerprint() == gpt.standard_library().fingerprint()
    assert text.train.dtype == text.validation.dtype == np.uint8
    assert text.train.size > 3 * text.validation.size > 300_000
    # A file stands on one side, whole.
    source = pathlib.Path(dataclasses.__file__).read_bytes()
    assert (source in text.train.tobytes()) != (source in text.validation.tobytes())


def test_windows_reach_both_ends_of_the_text_and_not_beyond(gpt):
    text = jnp.arange(10, dtype=jnp.uint8)
    windows = gpt.random_windows(text, jax.random.key(0), 200, 7)
    np.testing.assert_array_equal(windows, np.asarray(windows)[:, :1] + np.arange(8))
    assert set(windows[:, 0].tolist()) == {0, 1, 2}
    spread = gpt.spread_windows(np.arange(10, dtype=np.uint8), 3, 7, count=4)
    assert spread.shape == (2, 3, 8)
    assert spread[0, 0, 0] == 0
    assert spread[-1, -1, -1] == 9


def test_a_loss_that_is_not_finite_stops_the_run(gpt, tmp_path):
    flags = ["--steps", "9", "--learning-rate", "1e30", "--log-every", "1", "--out", str(tmp_path)]
    with pytest.raises(SystemExit, match="try a lower --learning-rate"):
        gpt.main([*SMALL, *flags])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--steps", "0"], "--steps: must be an integer of at least 1, got '0'"),
        (["--batch", "many"], "--batch: must be an integer of at least 1, got 'many'"),
        (["--seed", "-1"], "--seed: must be an integer of at least 0, got '-1'"),
        (["--learning-rate", "0"], "--learning-rate: must be a number > 0, got '0'"),
        (["--learning-rate", "nan"], "--learning-rate: must be a number > 0, got 'nan'"),
        (["--temperature", "-0.5"], "--temperature: must be a number >= 0, got '-0.5'"),
        (["--implementation", "fast"], "--implementation: invalid choice: 'fast'"),
        (["--preset", "huge"], "--preset: invalid choice: 'huge'"),
        (["--width", "30", "--heads", "4"], "--width must be a multiple of --heads 4, got 30"),
        (["--heads", "4", "--kv-heads", "3"], "--heads must be a multiple of --kv-heads 3, got 4"),
        (["--width", "12", "--heads", "4"], "the head_dim, must be even and at most 256, got 12 / 4 = 3"),
        (["--width", "1032", "--heads", "4"], "the head_dim, must be even and at most 256, got 1032 / 4 = 258"),
        (["--length", "1000000000"], "--length must be below"),
        (["--length", "10", "--sample", "7"], "must fit the context of --length 10 bytes, got 4 + 7"),
        (["--prompt", "", "--sample", "7"], "--prompt must not be empty"),
        (["--resume"], "--resume found no checkpoint in runs"),
        (["--resume", "--out", "nowhere"], "--resume found no checkpoint in nowhere"),
        (["--out", "file"], "file"),
    ],
)
def test_bad_flags_are_named(gpt, tmp_path, monkeypatch, capsys, flags, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("not a folder")
    assert message in error_of(gpt, capsys, flags)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]  # nothing left behind


@needs_cpu
def test_an_implementation_that_is_not_there_is_an_error_with_its_reason(gpt, tmp_path, capsys):
    message = error_of(gpt, capsys, ["--implementation", "cuda", "--out", str(tmp_path)])
    assert "--implementation cuda: implementation='cuda' does not serve this call" in message


def test_help(gpt, capsys):
    with pytest.raises(SystemExit) as stop:
        gpt.main(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for name in ("--implementation", "--preset", "--resume", "standard library", *gpt.PRESETS):
        assert name in text


@pytest.mark.parametrize("name", ["tiny", "small", "medium", "large"])
def test_presets_fit_together(gpt, name):
    config = gpt.PRESETS[name]
    config.check()
    assert config.head_dim % 8 == 0  # no padding in the kernels


def error_of(gpt, capsys, flags):
    with pytest.raises(SystemExit) as stop:
        gpt.main(flags)
    assert stop.value.code == 2
    return capsys.readouterr().err


def small_config(gpt):
    return gpt.Config(
        layers=2, width=32, heads=4, kv_heads=2, length=64, batch=4, steps=10, learning_rate=0.01, dtype="float32"
    )
