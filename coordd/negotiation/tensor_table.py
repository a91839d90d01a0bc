"""The tensor table: the tensors that this rank has submitted and whose results have not arrived.

Pure bookkeeping on one thread. An entry stays until its operation is done or failed, so nothing is ever lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from types import CodeType
from typing import Any, Protocol

import numpy as np

from coordd.errors import DuplicateNameError
from coordd.negotiation.group_names import covers, is_group
from coordd.negotiation.response_cache import ResponseCache
from coordd.negotiation.wire import mask
from coordd.ops.messages import Announcement, Report, Request

__all__ = ["Entry", "Promise", "Site", "TensorTable", "announced", "show_site"]

Site = tuple[CodeType, int] | None


class Promise(Protocol):
    """The interface of a handle that the daemon needs; a plugin may provide its own class."""

    @property
    def name(self) -> str:
        """The name of the operation."""
        ...

    @property
    def submitted(self) -> float:
        """When it was submitted, in seconds of `time.monotonic`."""
        ...

    def land(self, value: Any, convert: Callable[[Any], Any] | None) -> None:
        """Completes with a received value; ``convert`` makes the result of it, and may fail."""
        ...

    def resolve(self, result: Any) -> None:
        """Completes with a result as it is."""
        ...

    def fail(self, error: BaseException) -> None:
        """Completes with an error."""
        ...


class Entry:
    """One tensor that this rank has submitted.

    ``array`` is reduced or filled in place; ``land`` runs on the daemon's thread after the data has arrived, and its
    value becomes the handle's result. A ``filler`` contributes zeros if another rank has data; if no rank has, its
    result is None. ``released`` means that all ranks have it, so that its data may be in flight; ``awaited`` that a
    thread may be waiting for it; ``patient`` that it ends only after all operations that other ranks do before it.
    ``splits`` are the rows for each member of an alltoall.
    """

    __slots__ = (
        "array",
        "awaited",
        "filler",
        "handle",
        "land",
        "patient",
        "released",
        "request",
        "seal",
        "site",
        "sized",
        "splits",
        "turn",
    )

    def __init__(  # noqa: PLR0913, PLR0917 - made for every gradient, and keywords cost time
        self,
        request: Request,
        array: np.ndarray,
        handle: Promise,
        site: Site = None,
        land: Callable[[Any], object] | None = None,
        filler: bool = False,  # noqa: FBT001, FBT002 - as above
    ) -> None:
        self.request = request
        self.filler = filler
        self.array = array
        self.handle = handle
        self.site = site
        self.land = land
        self.turn = (0, 0)
        """The number of the bucket in which it was started last, and its position there; equal on all ranks."""
        self.released = False
        self.awaited = False
        self.patient = False
        self.splits: np.ndarray | None = None
        self.sized = False
        """Whether ``land`` gets rows and how many each member had, in place of the rows."""
        self.seal: int | None = None
        """Checksum of the array at submission, if that is checked; see `coordd.collectives.in_flight_check`."""

    def finish(self, array: np.ndarray) -> None:
        """Completes the handle with the result."""
        self.handle.land(array, self.land)

    def finish_rows(self, rows: np.ndarray, sizes: Sequence[int]) -> None:
        """Completes the handle with rows and, if ``sized``, the number of rows of each member."""
        self.handle.land((rows, np.array(sizes, np.int64)) if self.sized else rows, self.land)


class TensorTable:
    """Entries by name, oldest first."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self._names: dict[str, Entry] = {}
        """Entries that are submitted and not done, even before they are admitted; written by all threads."""
        self.last: tuple[str, Site, float] | None = None
        """Name, site and time of the last submission; not the entry, whose memory must be freed once it is done."""

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def reserve(self, entry: Entry) -> None:
        """Claims an entry's name until its operation is done; on the thread that submits it.

        Raises:
            DuplicateNameError: an operation of this name is in flight.
        """
        first = self._names.setdefault(entry.request.name, entry)  # atomic, so two threads cannot both succeed
        if first is not entry:
            raise _duplicate(entry, first)

    def reserved(self, name: str) -> bool:
        """Returns whether a name, or one of a group that a refusal names, is claimed; for any thread."""
        return name in self._names or (is_group(name) and any(covers(name, each) for each in list(self._names)))

    def reserve_all(self, entries: Sequence[Entry]) -> None:
        """Claims the names of several entries, or of none of them; raises like `reserve`."""
        for place, entry in enumerate(entries):
            try:
                self.reserve(entry)
            except DuplicateNameError:
                for claimed in entries[:place]:
                    del self._names[claimed.request.name]
                raise

    def admit(self, entries: Iterable[Entry]) -> list[Entry]:
        """Adds new entries, and returns them.

        A name that is still in flight is rejected: the later entry fails, and no other rank is notified.
        """
        admitted = []
        for entry in entries:
            request = entry.request
            if (first := self._entries.setdefault(request.name, entry)) is entry:
                entry.released = entry.awaited = False  # it may have been in the table before
                admitted.append(entry)
            else:
                entry.handle.fail(_duplicate(entry, first))
        if admitted:
            last = admitted[-1]
            self.last = last.request.name, last.site, last.handle.submitted
        return admitted

    def release(self, entry: Entry) -> None:
        """Removes an entry whose operation is done; the placeholder of a joined rank is not in the table."""
        if self._entries.get(entry.request.name) is entry:
            del self._entries[entry.request.name]
            self._names.pop(entry.request.name, None)

    def take(self, name: str) -> Entry:
        """Removes and returns an entry."""
        self._names.pop(name, None)
        return self._entries.pop(name)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def find(self, name: str) -> Entry:
        """Returns an entry."""
        return self._entries[name]

    def oldest(self) -> list[Entry]:
        """Returns the oldest entry; if that is patient, also the following ones, up to the first that is not."""
        found = []
        for entry in self._entries.values():
            found.append(entry)
            if not entry.patient:
                break
        return found

    def clear(self) -> list[Entry]:
        """Removes and returns all entries."""
        return [self.take(name) for name in list(self._entries)]


def _duplicate(entry: Entry, first: Entry) -> DuplicateNameError:
    sites = {"site": show_site(entry.site), "first_site": show_site(first.site)}
    return DuplicateNameError(entry.request.name, **sites)


def announced(entries: Iterable[Entry], cache: ResponseCache, *, seen: int) -> Report | None:
    """Builds the report of new tensors: cached ones as bits, the others spelled out.

    Returns:
        the report; None if nothing is new.
    """
    hits = fillers = 0
    fresh = []
    for entry in entries:
        slot = cache.slot(entry.request)
        if slot >= 0 and cache.site(slot) == entry.site:
            hits |= 1 << slot
            fillers |= entry.filler << slot
        else:
            if slot >= 0:
                cache.adopt(slot, entry.request, entry.site)
            fresh.append(Announcement(entry.request, show_site(entry.site), entry.filler))
    return Report(seen, mask(hits), mask(fillers), tuple(fresh)) if hits or fresh else None


def show_site(site: Site) -> str:
    """Formats a call site: ``train.py:31``."""
    return f"{site[0].co_filename}:{site[1]}" if site is not None else "an unknown place"
