"""Adasum: a sum of gradients that keeps the component of each gradient that the others lack.

Two parallel gradients are averaged, two orthogonal ones are added, with a smooth transition in between: ``(1 - a·b /
2|a|²) a + (1 - a·b / 2|b|²) b``. More than two are combined in pairs, then pairs of pairs, in rank order; a gradient
without a partner waits for the next round. (Maleki et al., "Scaling distributed training with adaptive summation",
2020.)

However they are paired, the result is a weighted sum of the gradients, and the weights follow from their scalar
products. So each member receives its slice of all gradients, the products of the slices are added up, and then every
member computes the weighted sum of its slice: this moves as many bytes as an ordinary sum, for any number of members.
"""

from __future__ import annotations

import numpy as np

from coordd.collectives.alltoall import cut, exchange
from coordd.collectives.ring import Group, Steps

__all__ = ["adasum", "weights"]

_AT_ONCE = 1 << 16


def weights(products: np.ndarray) -> np.ndarray:
    """Returns the weight of each gradient in their adaptive sum.

    Args:
        products: float64 of shape (n, n), the scalar products of all pairs.

    Returns:
        float64 of shape (n,).
    """
    parts = list(np.eye(len(products)))
    while len(parts) > 1:
        pairs = [_pair(parts[at], parts[at + 1], products) for at in range(0, len(parts) - 1, 2)]
        parts = [*pairs, *parts[2 * len(pairs) :]]
    return np.asarray(parts[0])


def _pair(left: np.ndarray, right: np.ndarray, products: np.ndarray) -> np.ndarray:
    """Combines two weighted sums, given as their weights."""
    both = left @ products @ right
    return _kept(both, left @ products @ left) * left + _kept(both, right @ products @ right) * right


def _kept(both: float, own: float) -> float:
    """Returns the fraction of a gradient that is kept; 1 for a gradient of zero norm."""
    return 1.0 - both / (2.0 * own) if own > 0 else 1.0


def adasum(group: Group, array: np.ndarray, *, prescale: float, postscale: float) -> Steps:
    """Replaces flat contiguous arrays of floats, of equal size on all members, by their adaptive sum."""
    exact = np.dtype(np.float64 if array.dtype == np.float64 else np.float32)
    slices = cut(array, group.size)
    mine = slices[group.me]
    parts = [mine.copy() if index == group.me else np.empty_like(mine) for index in range(group.size)]
    yield from exchange(group, slices, parts)
    rows = np.stack([part.astype(exact) for part in parts]) * exact.type(prescale)
    products = [np.zeros((group.size, group.size)) for _ in group.members]
    products[group.me] = _products(rows)
    yield from exchange(group, [products[group.me].reshape(-1)] * group.size, [each.reshape(-1) for each in products])
    found = weights(sum(products[1:], products[0])) * postscale
    mine[...] = _weighted(found, rows)
    yield from exchange(group, [mine] * group.size, slices)


def _products(rows: np.ndarray) -> np.ndarray:
    """Returns the scalar products of all pairs of rows, in double precision."""
    found = np.zeros((len(rows), len(rows)))
    for start in range(0, rows.shape[1], _AT_ONCE):
        part = rows[:, start : start + _AT_ONCE].astype(np.float64)
        found += part @ part.T
    return found


def _weighted(found: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Returns the weighted sum of the rows, added in rank order."""
    total = rows[0] * rows.dtype.type(found[0])
    for weight, row in zip(found[1:], rows[1:], strict=True):
        total += row * rows.dtype.type(weight)
    return np.asarray(total)
