"""What is said of one name of Horovod's, and the names that belong together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

__all__ = ["BF16", "FACTORS", "PROCESS_SET", "Name", "Part"]

# What many signatures, or many judgements, have in common.
PROCESS_SET = "process_set=global_process_set"
FACTORS = "prescale_factor=1.0, postscale_factor=1.0"
BF16 = "bf16 too; 16-bit values are added in fp32; sums of integers wrap, averages truncate"


class Name(NamedTuple):
    """One public name.

    Attributes:
        name: with its owner, as in ``ProcessSet.ranks``.
        signature: the parameters, as Python writes them; None if it is not called.
        better: what coordd does that Horovod does not.
        note: what else is to be said.
        refused: why it is not there at all.
        differs: which calls are taken otherwise, where no signature tells.
    """

    name: str
    signature: str | None = None
    better: str = ""
    note: str = ""
    refused: str = ""
    differs: str = ""


class Part(NamedTuple):
    """Names that one module has, or several have alike.

    Attributes:
        title: what the page calls it.
        modules: each is asked for every name.
        tables: the names, by what they are for.
    """

    title: str
    modules: tuple[str, ...]
    tables: Mapping[str, tuple[Name, ...]]

    @property
    def names(self) -> list[Name]:
        """All of them."""
        return [name for names in self.tables.values() for name in names]
