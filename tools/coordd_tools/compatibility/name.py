"""The table's entry for one Horovod name, and parts: names that belong together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

__all__ = ["BF16", "FACTORS", "PROCESS_SET", "Name", "Part"]

# Parts of text that many signatures or notes share.
PROCESS_SET = "process_set=global_process_set"
FACTORS = "prescale_factor=1.0, postscale_factor=1.0"
BF16 = "bf16 too; 16-bit values are added in fp32; sums of integers wrap, averages truncate"


class Name(NamedTuple):
    """One public name.

    Attributes:
        name: with its owner, as in ``ProcessSet.ranks``.
        signature: the parameters in Python syntax; None if it is not callable.
        better: what coordd does and Horovod does not.
        note: other remarks.
        refused: why coordd does not have the name at all.
        differs: which calls behave differently in ways that the signature does not show.
    """

    name: str
    signature: str | None = None
    better: str = ""
    note: str = ""
    refused: str = ""
    differs: str = ""


class Part(NamedTuple):
    """Names of one module, or names that several modules share.

    Attributes:
        title: the heading on the page.
        modules: every name is looked up in each of them.
        tables: the names, grouped by purpose.
    """

    title: str
    modules: tuple[str, ...]
    tables: Mapping[str, tuple[Name, ...]]

    @property
    def names(self) -> list[Name]:
        """All names of the part."""
        return [name for names in self.tables.values() for name in names]
