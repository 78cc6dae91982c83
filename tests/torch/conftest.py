"""Every test starts from the same random numbers."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)
