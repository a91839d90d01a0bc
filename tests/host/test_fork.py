"""What a forked child does to the descriptors that it shares with its parent."""

from __future__ import annotations

import os
import socket

import pytest

from coordd.host.fork import close_sockets


@pytest.fixture
def limited():
    socket.setdefaulttimeout(30.0)
    yield
    socket.setdefaulttimeout(None)


@pytest.mark.usefixtures("limited")
def test_the_parents_sockets_stay_blocking_whatever_the_default_time_limit():
    left, right = os.pipe()  # no sockets, which are passed over
    here, there = socket.socketpair()
    for each in (here, there):
        each.settimeout(None)
    if (child := os.fork()) == 0:
        close_sockets(lambda _: False)
        os._exit(0 if socket.getdefaulttimeout() == 30.0 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert [os.get_blocking(each.fileno()) for each in (here, there)] == [True, True]
    for each in (here, there):
        each.close()
    os.close(left)
    os.close(right)
