"""The program that the ranks of `coordd doctor`'s self-test run: ``python -m coordd.launch.selftest``."""

from __future__ import annotations

import sys

__all__ = ["main"]

_ELEMENTS = 1 << 16


def main() -> int:
    """Averages an array over all ranks through the daemon and checks every element; returns the exit code."""
    import numpy as np

    import coordd

    coordd.init()
    rank, size = coordd.rank(), coordd.size()
    mine = np.arange(_ELEMENTS, dtype=np.float32) + rank
    mean = coordd.allreduce(mine, name="selftest")
    right = np.array_equal(mean, np.arange(_ELEMENTS, dtype=np.float32) + (size - 1) / 2)
    coordd.shutdown()
    if not right:
        sys.stderr.write(f"rank {rank} of {size}: the mean of {_ELEMENTS} elements is wrong\n")
        return 1
    if rank == 0:
        sys.stdout.write(f"{size} ranks agree on {_ELEMENTS} elements\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
