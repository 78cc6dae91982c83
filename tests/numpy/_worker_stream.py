"""Folds a stream and is killed in the middle of it: ``FOLDER KILL_AFTER`` (-1: runs to its end)."""

import os
import signal
import sys
from pathlib import Path

import numpy as np

from microbatch.numpy import AccumulationType, accumulate

KINDS = {
    "mean": AccumulationType.MEAN,
    "rows": AccumulationType.CONCAT,
    "disk": AccumulationType.CONCAT,
}


def statistics(scale, x):
    return {"mean": (scale * x).mean(0), "rows": x * scale, "disk": x + scale}


def stream(kill_after):
    rng = np.random.default_rng(0)
    for i in range(20):
        if i == kill_after:
            os.kill(os.getpid(), signal.SIGKILL)
        yield (rng.normal(size=(5 if i < 19 else 2, 3)),)


def main(folder, kill_after):
    out = folder / "rows.npy"
    mode = "r+" if out.exists() else "w+"
    rows = np.lib.format.open_memmap(out, mode=mode, dtype=np.float64, shape=(97, 3))
    result = accumulate(statistics, KINDS)(
        0.3,
        microbatches=stream(kill_after),
        checkpoint=folder / "state",
        out={"mean": None, "rows": None, "disk": rows},
    )
    rows.flush()
    np.savez(folder / "result.npz", mean=result["mean"], rows=result["rows"], disk=result["disk"])


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
