"""The example with a spread sequence trains as a single device does."""

import importlib.util
import pathlib
import re
import sys

import pytest

FOLDER = pathlib.Path(__file__).parents[1] / "examples"
SMALL = ["--layers", "1", "--width", "32", "--length", "64", "--steps", "4"]
pytestmark = pytest.mark.usefixtures("as_an_example_runs")


@pytest.fixture(scope="module")
def example():
    sys.path.insert(0, str(FOLDER))
    try:
        spec = importlib.util.spec_from_file_location("train_long_context", FOLDER / "train_long_context.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(FOLDER))
    yield module
    for name in (spec.name, "train_gpt"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    "flags",
    [
        ["--data", "2", "--schedule", "ring"],
        pytest.param(["--seq", "4", "--schedule", "ring", "--order", "striped"], marks=pytest.mark.slow),
        pytest.param(["--seq", "4", "--schedule", "all_gather", "--order", "contiguous"], marks=pytest.mark.slow),
        pytest.param(["--data", "2", "--schedule", "ulysses"], marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_losses_are_those_of_one_device(example, capsys, monkeypatch, flags):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_latency_hiding_scheduler=true")  # which main() would add
    assert example.main([*SMALL, *flags]) == 0
    printed = capsys.readouterr().out
    assert float(re.search(r"largest difference .*: (\S+)", printed)[1]) < 1e-3
    assert re.search(r"\d devices +[\d,]+ tokens/s, [\d.]+ MB of memory per device", printed)
    if "ring" in flags:
        assert re.search(r"devices .*collective-permute [\d.]*[1-9]", printed)


def test_collectives_are_read(example):
    """Of a program for CPUs and of one for GPUs, whose collectives begin and end."""

    class Program:
        def __init__(self, text):
            self.text = text

        def as_text(self):
            return self.text

    cpu = "  %all-gather.1 = f32[8,16]{1,0} all-gather(%x), channel_id=1\n"
    gpu = """
      %all-gather-start = ((bf16[4,8]{1,0}, bf16[4,8]{1,0}), (bf16[16,8]{1,0}, bf16[16,8]{1,0})) all-gather-start(%a)
      %all-gather-done = (bf16[16,8]{1,0}, bf16[16,8]{1,0}) all-gather-done(%all-gather-start), metadata={}
      %reduce-scatter.2 = (f32[1,4]{1,0}, f32[1,4]{1,0}) reduce-scatter(%c, %d), channel_id=1
      %all-to-all-start = ((bf16[2,8]{1,0}), bf16[2,8]{1,0}) all-to-all-start(%e), channel_id=1
      %all-to-all-done = bf16[2,8]{1,0} all-to-all-done(%all-to-all-start)
    """
    assert example.communicated(Program(cpu)) == {"all-gather": 512}
    assert example.communicated(Program(gpu)) == {"all-gather": 512, "reduce-scatter": 32, "all-to-all": 32}


def test_flags_that_do_not_fit(example, capsys, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_latency_hiding_scheduler=true")
    for flags, message in (
        (["--length", "66"], "--length must suit --seq 2 and --order zigzag: take 68"),
        (["--data", "2", "--batch", "3"], "--batch must be a multiple of --data 2, got 3"),
        (["--seq", "1024"], "--data and --seq need 1024 devices"),
        (["--seq", "8", "--schedule", "ulysses"], "does not serve this call"),
    ):
        with pytest.raises(SystemExit):
            example.main([*SMALL, *flags])
        assert message in capsys.readouterr().err
