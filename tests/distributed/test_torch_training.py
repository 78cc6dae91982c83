"""The training step in two processes (gloo): the checks are in `_worker_torch.py`, run together because starting costs seconds."""

import ast
import os
import pathlib
import socket
import subprocess
import sys

import pytest

WORKER = pathlib.Path(__file__).with_name("_worker_torch.py")
CHECKS = [
    node.name
    for node in ast.parse(WORKER.read_text()).body
    if isinstance(node, ast.FunctionDef)
    and any(getattr(decorator, "id", "") == "check" for decorator in node.decorator_list)
]


def free_port():
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return str(probe.getsockname()[1])


def run_both(*names):
    """What both processes print; a process that hangs is ended and what it printed is kept."""
    port = free_port()
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(rank), port, *names],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment,
        )
        for rank in range(2)
    ]  # fmt: skip
    outputs = []
    for process in processes:
        try:
            outputs.append(process.communicate(timeout=240)[0])
        except subprocess.TimeoutExpired:
            process.kill()
            outputs.append(process.communicate()[0] + "\nhung")
    return outputs


@pytest.fixture(scope="module")
def outputs():
    return run_both()


@pytest.mark.parametrize("name", CHECKS)
def test_in_two_processes(outputs, name):
    for rank, output in enumerate(outputs):
        assert f"passed {name}\n" in output, f"process {rank}:\n{output[-4000:]}"
