"""Loaders that read ahead give what the loader beside them gives, and end with it."""

from __future__ import annotations

import threading

import pytest
from horovod.data import AsyncDataLoaderMixin, BaseDataLoader


class Numbers(BaseDataLoader):
    def __init__(self, count, bad=None, error=ValueError):
        self.count, self.bad, self.error, self.read = count, bad, error, []

    def __len__(self):
        return self.count

    def _iterate(self):
        for number in range(self.count):
            if number == self.bad:
                raise self.error(f"cannot read {number}")
            self.read.append(threading.current_thread().name)
            yield number

    def _process_batch(self, batch):
        return batch, threading.current_thread().name


class Ahead(AsyncDataLoaderMixin, Numbers): ...


def readers():
    return [thread for thread in threading.enumerate() if thread.name == "horovod.data"]


@pytest.mark.parametrize("size", [0, 1, 2, 64])
def test_every_epoch_is_whole_and_processed_where_it_is_used(size):
    loader = Ahead(async_loader_queue_size=size, debug_data_loader=False, count=5)
    here = threading.current_thread().name
    for _ in range(3):
        assert list(loader) == [(number, here) for number in range(5)]
    assert set(loader.read) == {"horovod.data" if size else here}
    assert (len(loader), readers()) == (5, [])


def test_a_plain_loader_iterates():
    assert [batch for batch, _ in Numbers(3)] == [0, 1, 2]
    with pytest.raises(NotImplementedError):
        len(BaseDataLoader())


@pytest.mark.parametrize("error", [ValueError, SystemExit, KeyboardInterrupt])
def test_what_goes_wrong_in_the_thread_is_raised_where_the_batches_are_used(error):
    batches = iter(Ahead(count=5, bad=2, error=error))
    assert [next(batches)[0], next(batches)[0]] == [0, 1]
    with pytest.raises(error, match="cannot read 2"):
        next(batches)
    assert readers() == []


def test_an_epoch_may_be_left_before_its_end():
    loader = Ahead(async_loader_queue_size=1, count=100)
    batches = iter(loader)
    assert next(batches)[0] == 0
    assert len(readers()) == 1
    loader.close_async_loader()
    assert readers() == []
    assert len(loader.read) <= 3
    assert [batch for batch, _ in loader] == list(range(100))


def test_epochs_are_told_when_asked_for(caplog):
    list(Ahead(debug_data_loader=True, count=1))
    assert caplog.messages == ["Ahead: an epoch begins", "Ahead: an epoch ends"]
