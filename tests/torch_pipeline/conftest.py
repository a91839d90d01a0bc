from __future__ import annotations

import pytest
import torch


@pytest.fixture
def exact():
    """Computes in double precision, and with the same random numbers each time."""
    torch.manual_seed(3)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
