"""Every PyTorch example runs, and does what it says."""

import importlib.util
import os
import pathlib
import subprocess
import sys

import pytest
import torch

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_example_is_short():
    for path in EXAMPLES.glob("torch_*.py"):
        assert len(path.read_text().splitlines()) < 80, path.name


def test_every_example_has_a_test():
    text = pathlib.Path(__file__).read_text()
    for path in EXAMPLES.glob("torch_*.py"):
        assert f'"{path.stem}"' in text, path.name


def test_plain_loop():
    losses = load("torch_plain_loop").main(steps=15)
    assert losses[-1] < 0.6 * losses[0]


def test_C12_C13_scale_clip_and_schedule_advance_once_per_window():
    losses, counts, schedule_steps = load("torch_grad_scaler").main(epochs=2)
    assert counts == {"unscale": 6, "clip": 6, "step": 6} and schedule_steps == 6
    assert losses[-1] < losses[0]


def test_C12_the_moving_average_advances_once_per_step():
    averages = load("torch_ema").main()
    whole = averages[64]
    for average in averages.values():
        assert average.n_averaged == 10
        torch.testing.assert_close(average.module.weight, whole.module.weight, rtol=1e-12, atol=0)


def test_N20_contrastive_with_a_learned_temperature():
    losses, error = load("torch_contrastive").main(steps=10)
    assert losses[-1] < losses[0] and error < 1e-6


def test_transformers_weighted_by_tokens():
    pytest.importorskip("transformers")
    losses, error = load("torch_transformers").main(steps=8)
    assert losses[-1] < losses[0] and error < 1e-6


def test_accelerate():
    pytest.importorskip("accelerate")
    losses = load("torch_accelerate").main(epochs=2)
    assert len(losses) == 8 and losses[-1] < losses[0]


def test_lightning(monkeypatch, tmp_path):
    pytest.importorskip("lightning")
    monkeypatch.chdir(tmp_path)
    losses, whole = load("torch_lightning").main()
    torch.testing.assert_close(losses, whole, rtol=1e-4, atol=0)


def test_trainer():
    pytest.importorskip("transformers")
    losses, whole = load("torch_trainer").main(steps=4)
    assert losses == pytest.approx(whole, rel=1e-4)


@pytest.mark.parametrize("name", ["torch_ddp", "torch_fsdp2"])
def test_two_processes(name):
    ran = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         str(EXAMPLES / f"{name}.py")],
        capture_output=True, text=True, timeout=240, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert "loss" in ran.stdout
