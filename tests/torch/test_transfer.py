"""Microbatches travel one ahead: the order of sends and uses, with a stand-in where there is no CUDA device."""

import contextlib

import torch

from microbatch.torch import _transfer


class Stream:
    def __init__(self, log):
        self.log = log

    def wait_stream(self, other):
        self.log.append("wait")


def test_the_next_microbatch_is_sent_before_the_current_one_is_used(monkeypatch):
    log = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(log))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(log))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(_transfer, "_pinned", lambda tensor: tensor)
    device = type("Device", (), {"type": "cuda"})()
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, device, non_blocking: tensor + 0)

    def take(index):
        log.append(f"send {index}")
        return (torch.tensor([float(index)]), "text")

    for microbatch, text in _transfer.moved(take, [0, 2, 5], device):
        log.append(f"use {int(microbatch)} {text}")
    assert log == [
        "send 0", "wait", "send 2", "use 0 text", "wait", "send 5", "use 2 text", "wait", "use 5 text",
    ]  # fmt: skip


def test_without_a_device_nothing_moves_and_nothing_is_taken_early():
    taken = []
    microbatches = _transfer.moved(lambda i: taken.append(i) or i, [0, 1], None)
    assert next(microbatches) == 0 and taken == [0]
    assert next(microbatches) == 1 and taken == [0, 1]
