"""The handwritten digits that ship with scikit-learn, as the demo uses them.

The learning rates were chosen on rows of the training set alone, by the accuracy on the last 288 of them after 100 steps
on the others, a mean over seeds: the smallest rate that is within one standard error of the best. The test images had no
say.
"""

import importlib
from dataclasses import dataclass
from types import ModuleType

import numpy as np

from microbatch.cli._errors import UsageError

TRAINING_ROWS, TEST_ROWS = 1437, 360


@dataclass(frozen=True)
class Digits:
    """Images ``[rows, 8, 8]`` in 0…1, float32, and labels ``[rows]`` in 0…9, int32."""

    images: np.ndarray
    labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray


def load_digits() -> Digits:
    """1,437 training and 360 test images, in the same order on every machine and for every seed."""
    data = _datasets().load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    images = (data.images[order] / 16).astype(np.float32)
    labels = data.target[order].astype(np.int32)
    train, test = slice(TRAINING_ROWS), slice(TRAINING_ROWS, TRAINING_ROWS + TEST_ROWS)
    return Digits(images[train], labels[train], images[test], labels[test])


def _datasets() -> ModuleType:
    try:
        return importlib.import_module("sklearn.datasets")
    except ImportError:
        raise UsageError(
            "the handwritten digits, which are the example where no target is given, need scikit-learn, "
            'which is not installed.\nInstall it with: pip install "microbatch[demo]"'
        ) from None
