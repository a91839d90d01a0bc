"""Exceptions of signal handlers that break into coordd's own work: the job ends, and no rank goes on out of step."""

from __future__ import annotations

import os
import sys
import threading
from types import SimpleNamespace

import pytest
import torch

import coordd
import coordd.torch as cd
from coordd import api
from coordd.daemon.point_to_point import Messages
from coordd.daemon.wakeup import Bell
from coordd.errors import CoorddError, DeadlockError, PeerError
from coordd_torch.tensors import borrow
from tests.interrupting import Handler
from tests.local_ranks import each_rank

REASON = "rank 0 was interrupted by .* during "


class LateError(Exception):
    """What a handler of SIGALRM raises."""


class LimitError(CoorddError):
    """What another one raises, which looks like an error of coordd's own."""


ERRORS = [KeyboardInterrupt, LateError, LimitError]


def once(function, error, *, after):
    """Raises an error before or after this thread's first call of a function, as a handler does.

    What other threads call is not changed: ranks are threads here, and share what is patched in a module.
    """
    thread = threading.get_ident()
    struck = []

    def strike(*args, **kwargs):
        strikes = not struck and threading.get_ident() == thread
        found = None if strikes and not after else function(*args, **kwargs)
        if strikes:
            struck.append(True)
            raise error
        return found

    return strike


def received_after(patch, error):
    """What rank 1 receives after an error has broken into its first receive, with something patched."""

    def body(rank):
        if rank == 0:
            cd.barrier()
            for step in range(3):
                cd.send(torch.full((2,), float(step)), 1, "x")
            return []
        with pytest.MonkeyPatch.context() as patched:
            patch(patched)
            with pytest.raises(type(error)):
                cd.recv(torch.zeros(2), 0, "x")
        cd.barrier()
        return [cd.recv(torch.zeros(2), 0, "x")[0].item() for _ in range(3)]

    return each_rank(2, body)[1]


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("error", ERRORS)
def test_a_submission_that_is_interrupted_ends_the_job(error, after):
    """Whether the operation is on its way is not known, so that going on could pair it with a later one."""

    def body(rank):
        daemon = api.operations().daemon
        if rank == 0:
            daemon._inbox.put = once(daemon._inbox.put, error(), after=after)
            with pytest.raises(error):
                cd.allreduce(torch.ones(2), name="one")
        with pytest.raises(PeerError, match=REASON + "the submission of 'one'"):
            cd.allreduce(torch.ones(2), name="two" if rank == 0 else "one")

    each_rank(2, body)


@pytest.mark.parametrize("code", [0, None, 3])
def test_a_handler_that_exits_well_in_a_submission_does_not_fail_the_job(code):
    """As a handler of SIGTERM does that has saved a checkpoint: the process ends, and makes no other step."""

    def body(_):
        daemon = api.operations().daemon
        daemon._inbox.put = once(daemon._inbox.put, SystemExit(code), after=True)
        with pytest.raises(SystemExit):
            cd.allreduce(torch.ones(2), name="one")
        return daemon.failing

    if code:
        with pytest.raises(PeerError, match="interrupted by SystemExit"):
            each_rank(2, lambda rank: body(rank) and cd.barrier())
    else:
        assert each_rank(2, body) == [False, False]


def exits_in(function, operate):
    """Calls an operation, in which a handler exits with code 0 as soon as a function of coordd is called."""
    handler = Handler(0, every=True, begins=lambda frame: frame.f_code.co_name == function, error=SystemExit)
    sys.settrace(handler.trace)
    try:
        with pytest.raises(SystemExit):
            operate()
    finally:
        sys.settrace(None)


def test_other_ranks_go_on_alone_if_a_handler_exits_before_anything_is_submitted():
    def body(rank):
        if rank:
            exits_in("borrow", lambda: cd.allreduce(torch.ones(2), name="one"))
            assert not api.operations().daemon.half_done  # so that it joins when it leaves
            sums = []
        else:
            sums = [cd.allreduce(torch.ones(2), op=cd.Sum, name="one")[0].item() for _ in range(3)]
        cd.join()
        return sums

    assert each_rank(2, body) == [[1.0, 1.0, 1.0], []]


@pytest.mark.parametrize("name", [None, "objects"])
@pytest.mark.parametrize("operate", [cd.allgather_object, cd.broadcast_object])
def test_other_ranks_go_on_alone_if_a_handler_exits_in_the_wait_for_the_first_of_two_operations(operate, name):
    def body(rank):
        if rank:
            exits_in("result", lambda: operate(0, name=name))
            assert not api.operations().daemon.half_done
            found = []
        else:
            found = [operate(index, name=name) for index in range(3)]
        cd.join()
        return found

    assert each_rank(2, body)[0] == ([[0], [1], [2]] if operate is cd.allgather_object else [0, 1, 2])


@pytest.mark.parametrize("name", [None, "objects"])
def test_a_script_that_catches_such_an_exit_and_calls_the_next_operation_ends_the_job(name):
    def body(rank):
        if rank:
            exits_in("result", lambda: cd.allgather_object(0, name=name))
        for index in range(3):
            cd.allgather_object(index, name=name)

    with pytest.raises(PeerError, match=r"continued after sys\.exit\(0\) interrupted the wait for the first"):
        each_rank(2, body)


def test_a_script_that_catches_the_exit_of_a_handler_in_a_submission_of_gradients_does_not_wait_for_ever():
    def body(rank):
        weight = torch.nn.Parameter(torch.ones(2))
        optimizer = cd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.1), [("weight", weight)])
        daemon = api.operations().daemon
        if rank == 0:
            daemon._inbox.put = once(daemon._inbox.put, SystemExit(0), after=False)
            with pytest.raises(SystemExit):
                weight.sum().backward()
            optimizer.zero_grad()
        else:
            weight.sum().backward()
            cd.barrier()

    with pytest.raises(PeerError, match=r"continued after sys\.exit"):
        each_rank(2, body)


@pytest.mark.parametrize("error", ERRORS)
def test_a_send_that_is_interrupted_ends_the_job(error):
    def body(rank):
        daemon = api.operations().daemon
        if rank == 0:
            daemon._inbox.slip = once(daemon._inbox.slip, error(), after=True)
            with pytest.raises(error):
                cd.send(torch.ones(2), 1, "one")
        with pytest.raises(PeerError, match=REASON + "the send of 'one'"):
            cd.barrier()

    each_rank(2, body)


def test_what_a_signals_handler_submits_is_no_part_of_the_group_that_it_interrupts():
    """It would be announced with the group only, for which the handler does not return."""

    def body(rank):
        daemon = api.operations().daemon
        make = daemon.handle
        found = []

        def interrupted(*args, **kwargs):
            daemon.handle = make
            found.append(cd.allreduce(torch.full((1,), float(rank)), op=cd.Sum, name="handler").item())
            return make(*args, **kwargs)

        daemon.handle = interrupted
        sums = cd.grouped_allreduce([torch.ones(2), torch.ones(3)], op=cd.Sum, name="group")
        return [*found, *(each.tolist() for each in sums)]

    assert each_rank(2, body) == [[1.0, [2.0] * 2, [2.0] * 3]] * 2


@pytest.mark.parametrize("error", [error() for error in ERRORS], ids=repr)
def test_a_receive_that_is_broken_off_takes_no_message(error):
    """Else a second try would get the next one."""

    def broken_off(*args, **kwargs):
        handle = Messages.recv(api.operations(), *args, **kwargs)
        handle._hurry = once(handle._hurry, error, after=False)
        return handle

    def patch(patched):
        patched.setattr(api.operations(), "recv", broken_off)

    assert received_after(patch, error) == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("error", [error() for error in ERRORS], ids=repr)
def test_a_receive_that_is_broken_off_before_it_begins_leaves_its_message(error):
    """It is not told to the sender as a refusal, which would drop the message."""

    def patch(patched):
        patched.setattr("coordd_torch.operations.borrow", once(borrow, error, after=False))

    assert received_after(patch, error) == [0.0, 1.0, 2.0]


def test_a_receive_in_a_done_callback_takes_no_message():
    def body(rank):
        if rank == 0:
            cd.barrier()
            for step in range(2):
                cd.send(torch.full((2,), float(step)), 1, "x")
            return []
        refused = threading.Event()

        def receive(_):
            try:
                cd.recv(torch.zeros(2), 0, "x")
            except DeadlockError:
                refused.set()

        cd.allreduce_async(torch.ones(1), name="first", process_set=cd.ProcessSet([1])).add_done_callback(receive)
        assert refused.wait(10.0)
        cd.barrier()
        return [cd.recv(torch.zeros(2), 0, "x")[0].item() for _ in range(2)]

    assert each_rank(2, body)[1] == [0.0, 1.0]


def test_a_receive_whose_result_cannot_be_converted_has_not_been_broken_off():
    def body(rank):
        if rank == 0:
            cd.send(torch.ones(2), 1, "x")
        else:
            handle = api.operations().recv(None, 0, name="x", land=lambda _: 1 // 0)
            with pytest.raises(ZeroDivisionError) as caught:
                handle.result(10.0)
            api.operations().daemon.take_back(handle, caught.value)
        cd.barrier()

    each_rank(2, body)


def meet_until_the_job_ends():
    for _ in range(10_000):
        cd.barrier()


def test_a_receive_that_is_broken_off_as_its_message_comes_ends_the_job():
    def body(rank):
        if rank == 0:
            cd.send_async(torch.ones(2), 1, "x")  # it may end after the job has failed
        else:
            handle = cd.recv_async(torch.zeros(2), 0, "x")
            handle.wait(10.0)
            api.operations().daemon.take_back(handle, LateError())
        with pytest.raises(PeerError, match=r"rank 1 was interrupted by .*LateError as 'x' arrived, which is lost"):
            meet_until_the_job_ends()

    each_rank(2, body)


def distributed():
    model = torch.nn.Linear(2, 2, bias=False)
    torch.nn.init.ones_(model.weight)
    return model, cd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())


def step(model, optimizer, factor):
    optimizer.zero_grad()
    (model(torch.ones(1, 2)).sum() * factor).backward()
    found = model.weight.grad.tolist()
    optimizer.step()
    return found


@pytest.mark.parametrize("error", ERRORS)
def test_a_backward_pass_whose_wait_is_interrupted_ends_the_job(error):
    def body(rank):
        model, optimizer = distributed()
        for factor in range(3):
            step(model, optimizer, factor)
        underway = optimizer._coordd.underway
        if rank == 0:
            underway.wait = once(underway.wait, error(), after=False)
            with pytest.raises(error):
                step(model, optimizer, 3)
        with pytest.raises(PeerError, match=REASON + "the reduction of gradients"):  # rank 1 may complete one step
            [step(model, optimizer, factor) for factor in range(4, 6)]

    each_rank(2, body)


def test_a_bucket_that_an_exception_has_kept_back_is_discarded_on_all_ranks(monkeypatch):
    def body(rank):
        model, optimizer = distributed()
        for factor in range(3):
            step(model, optimizer, factor)
        (bucket,) = optimizer._coordd._buckets
        if rank == 0:
            bucket._entry = None  # so that the request is made anew
            channel = optimizer._coordd.channel
            channel.request = once(channel.request, LateError(), after=False)
            with pytest.raises(LateError):
                step(model, optimizer, 3)
        else:
            with pytest.raises(cd.DiscardedStepError):
                step(model, optimizer, 3)
        return [step(model, optimizer, factor + rank) for factor in range(4, 7)]

    first, second = each_rank(2, body)
    assert first == second == [[[factor + 0.5] * 2] * 2 for factor in range(4, 7)]


def test_a_shutdown_that_is_interrupted_before_its_goodbye_may_be_called_again(monkeypatch):
    coordd.init()
    daemon = api.operations().daemon
    monkeypatch.setattr(daemon, "_do", once(daemon._do, KeyboardInterrupt(), after=False))
    with pytest.raises(KeyboardInterrupt):
        coordd.shutdown()
    again = threading.Thread(target=coordd.shutdown, daemon=True)
    again.start()
    again.join(10.0)
    assert not again.is_alive()
    assert not coordd.is_initialized()


def test_a_ring_that_is_interrupted_does_not_keep_later_ones_from_waking(monkeypatch):
    bell = Bell()
    asleep = threading.Event()
    waits = bell._poll.poll
    monkeypatch.setattr(bell, "_poll", SimpleNamespace(poll=lambda limit: asleep.set() or waits(limit)))
    sleeper = threading.Thread(target=bell.sleep, args=(None,), daemon=True)
    sleeper.start()
    assert asleep.wait(10.0)  # a ring to a thread that is awake writes nothing
    monkeypatch.setattr(os, "write", once(os.write, KeyboardInterrupt(), after=False))
    with pytest.raises(KeyboardInterrupt):
        bell.ring()
    bell.ring()
    sleeper.join(10.0)
    assert not sleeper.is_alive()
    bell.close()
