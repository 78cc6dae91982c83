"""A fold over a stream that is killed on the way, for `test_stream.py`."""

import os
import signal
import time

import torch
import torch.nn.functional as F

from microbatch.torch import AccumulationType, accumulate

SUM, CONCAT, MAX = AccumulationType.SUM, AccumulationType.CONCAT, AccumulationType.MAX


def fun(scale, x):
    noisy = F.dropout(x, 0.5, True)
    return (scale * noisy).sum(0), noisy[:, 0], x.bfloat16().amax(0)


def stream(stop=None, wait=0.0):
    for i in range(12):
        if i == stop:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(wait)
        yield (torch.full((2 + i % 2, 3), float(i)),)


def fold(path, stop=None, wait=0.0):
    torch.manual_seed(0)
    scale = torch.tensor(1.0 / 3)
    return accumulate(fun, (SUM, CONCAT, MAX))(
        scale, microbatches=stream(stop, wait), checkpoint=path
    )
