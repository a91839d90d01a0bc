"""A loader of data to derive from, and a mixin that has a thread read ahead.

Its one rule: what goes wrong in that thread is raised where the batches are used.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from queue import Full, Queue
from threading import Event, Thread
from typing import Any

__all__ = ["AsyncDataLoaderMixin", "BaseDataLoader"]

log = logging.getLogger("coordd")

_LOOK_SECONDS = 0.1  # how long a reader that has nowhere to put its batch takes to see that nobody wants it


class BaseDataLoader:
    """Iterates over batches; a subclass says what they are by ``__len__`` and ``_iterate``."""

    def __len__(self) -> int:
        """Tells the number of batches.

        Raises:
            NotImplementedError: the subclass does not know.
        """
        raise NotImplementedError

    def __iter__(self) -> Iterator[Any]:
        """Iterates over the batches of one epoch."""
        return map(self._process_batch, self._iterate())

    def _iterate(self) -> Iterator[Any]:
        raise NotImplementedError

    def _process_batch(self, batch: Any) -> Any:
        """Runs on the thread that uses the batch, for what may not run on the one that reads it."""
        return batch


class _Last:
    """Comes after the last batch, with what went wrong."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error


class _Reader:
    """Reads one epoch ahead, on a thread of its own."""

    def __init__(self, batches: Iterator[Any], limit: int) -> None:
        self._queue: Queue[Any] = Queue(limit)
        self._unwanted = Event()
        self._thread = Thread(target=self._read, args=(batches,), name="horovod.data", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[Any]:
        while not isinstance(batch := self._queue.get(), _Last):
            yield batch
        if batch.error is not None:
            raise batch.error

    def close(self) -> None:
        """Ends the thread when it has read the batch that it is at."""
        self._unwanted.set()
        self._thread.join()

    def _read(self, batches: Iterator[Any]) -> None:
        last = _Last()
        try:
            for batch in batches:
                if not self._put(batch):
                    return
        except BaseException as error:  # noqa: BLE001 - raised where the batches are used; sys.exit must end the job there
            last = _Last(error)
        self._put(last)

    def _put(self, batch: Any) -> bool:
        while not self._unwanted.is_set():
            try:
                self._queue.put(batch, timeout=_LOOK_SECONDS)
            except Full:
                continue
            return True
        return False


class AsyncDataLoaderMixin:
    """Has a thread read ahead; comes first among the bases: ``class Ahead(AsyncDataLoaderMixin, MyLoader)``."""

    def __init__(
        self, async_loader_queue_size: int = 64, debug_data_loader: bool = False, *args: Any, **kwargs: Any
    ) -> None:
        """Prepares the loader.

        Args:
            async_loader_queue_size: how many batches are read ahead; 0 reads each when it is asked for.
            debug_data_loader: tells in the log when an epoch begins and ends.
            *args: what the loader beside it takes.
            **kwargs: the same.
        """
        self.async_loader_queue_size = async_loader_queue_size
        self.debug_data_loader = debug_data_loader
        self._reader: _Reader | None = None
        super().__init__(*args, **kwargs)

    def __iter__(self) -> Iterator[Any]:
        """Iterates over the batches of one epoch; one epoch at a time."""
        self.close_async_loader()
        if self.async_loader_queue_size <= 0:
            yield from super().__iter__()  # type: ignore[misc]  # of the loader beside it
            return
        self._tell("begins")
        self._reader = reader = _Reader(self._iterate(), self.async_loader_queue_size)  # type: ignore[attr-defined]  # as above
        try:
            for batch in reader:
                yield self._process_batch(batch)  # type: ignore[attr-defined]  # as above
        finally:
            reader.close()
            self._tell("ends")

    def close_async_loader(self) -> None:
        """Ends the thread, if an epoch was left before its end."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _tell(self, what: str) -> None:
        if self.debug_data_loader:
            log.warning("%s: an epoch %s", type(self).__name__, what)
