"""NumPy arrays as the tensors of frames."""

from __future__ import annotations

import numpy as np

from coordd.transport.shared_memory.loans import blank


class Arrays:
    """A codec; integers are not differentiable."""

    blank = staticmethod(blank)

    def is_tensor(self, value):
        return isinstance(value, np.ndarray)

    def differentiable(self, tensor):
        return tensor.dtype.kind == "f"

    def array(self, tensor):
        return tensor

    def tensor(self, array, *, differentiable):
        assert differentiable == self.differentiable(array)
        return array


ARRAYS = Arrays()
