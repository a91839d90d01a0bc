"""Small things that scripts take from here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, TypeVar

from horovod.common.basics import ccl_built, cuda_built, ddl_built, gloo_built, mpi_built, nccl_built, rocm_built
from horovod.refused import refusal

__all__ = [
    "ccl_built",
    "check_extension",
    "cuda_built",
    "ddl_built",
    "extension_available",
    "gloo_built",
    "gpu_available",
    "is_iterable",
    "mpi_built",
    "nccl_built",
    "num_rank_is_power_2",
    "rocm_built",
    "split_list",
]

T = TypeVar("T")


def check_extension(ext_name: str, *_: Any) -> None:
    """Refuses what coordd does not stand in for.

    Raises:
        ImportError: it is neither `horovod.torch` nor `horovod.tensorflow` nor `horovod.keras`.
    """
    if not extension_available(ext_name.rpartition(".")[2]):
        raise refusal(ext_name, "coordd stands in for horovod.torch, horovod.tensorflow and horovod.keras")


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:  # noqa: ARG001 - Horovod's signature
    """Says whether `horovod.<name>` can be imported."""
    return ext_base_name in {"keras", "tensorflow", "torch"}


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:  # noqa: ARG001 - Horovod's signature
    """Says whether PyTorch sees a GPU."""
    import torch

    return torch.cuda.is_available()


def is_iterable(x: object) -> bool:
    """Says whether something can be iterated over."""
    return isinstance(x, Iterable)


def num_rank_is_power_2(num_rank: int) -> bool:
    """Says whether a number of ranks is a power of two; nothing in coordd needs that."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def split_list(items: Sequence[T], parts: int) -> list[Sequence[T]]:
    """Cuts a list into so many parts, of lengths that differ by one at most; the longer ones come first."""
    size, longer = divmod(len(items), parts)
    ends = [index * size + min(index, longer) for index in range(parts + 1)]
    return [items[first:last] for first, last in pairwise(ends)]
