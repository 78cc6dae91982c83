"""Two processes with unequal budgets agree on the smaller size; the checks are in `_worker_plan.py`."""

import pathlib
import socket
import subprocess
import sys

import pytest

WORKER = pathlib.Path(__file__).with_name("_worker_plan.py")


@pytest.mark.parametrize("front", ["torch", "jax"])
def test_processes_agree_on_the_smallest_size(front):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, str(WORKER), front]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    workers = [subprocess.Popen([*command, str(rank), port], **pipes) for rank in range(2)]
    try:
        done = [worker.communicate(timeout=120) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert all(worker.returncode == 0 for worker in workers), "\n".join(err for _, err in done)
    sizes = {int(out.split()[-1]) for out, _ in done}
    assert len(sizes) == 1 and 1 <= sizes.pop() < 4096
