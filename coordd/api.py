"""The process's default daemon, and coordd's API without a framework: operations on NumPy arrays.

All module-level state of coordd lives here.
"""

from __future__ import annotations

import atexit
import contextlib
import contextvars
import itertools
import logging
import multiprocessing
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from coordd.config import LAUNCHED, Config, aliased, timeline_folder, unread
from coordd.daemon.daemon import Daemon
from coordd.daemon.operations import Operations
from coordd.daemon.process_exit import ExitWatch, await_own_end
from coordd.daemon.reject_on_all_ranks import refusable, telling
from coordd.daemon.rendezvous import meet, tell
from coordd.daemon.status_server import Desk
from coordd.daemon.testimony import in_brief
from coordd.errors import (
    ArgumentError,
    ConfigError,
    CoorddError,
    ForkedProcessError,
    NotInitializedError,
    PeerError,
    ShutdownError,
    StartError,
    WorkerProcessError,
    brief,
)
from coordd.host import presence
from coordd.host.launcher_environment import RANK_PID, identifying
from coordd.host.oversubscription import Crowd
from coordd.monitoring.status.address import identity, parent_of
from coordd.ops.handles import Handle, check_may_wait
from coordd.ops.messages import Kind, ReduceOp
from coordd.ops.process_sets import ProcessSet, global_process_set

__all__ = [
    "allgather",
    "allreduce",
    "barrier",
    "broadcast",
    "cross_rank",
    "cross_size",
    "init",
    "is_homogeneous",
    "is_initialized",
    "launcher_variables",
    "leaving",
    "local_rank",
    "local_size",
    "operations",
    "rank",
    "shutdown",
    "size",
    "source",
    "start_timeline",
    "stop_timeline",
    "using",
]

log = logging.getLogger("coordd")

_LINGER_SECONDS = 3.0
_HEARD_SECONDS = 0.3
_LEAVING = "coordd.leaving"
_TOLD_SECONDS = 10.0
"""How long other ranks may take to reach the last step that this rank has discarded."""


class _Default:
    """The default daemon, and how this process ends."""

    def __init__(self, config: Config) -> None:
        """Prepares a daemon; `start` starts it."""
        self.config = config
        self.pid = os.getpid()
        self._child = _of_a_rank()
        self.operations = Operations(Daemon(config, meet(config, one_of_many=not self._child)))
        self._desk = Desk(self.daemon, identity({} if config.alone else os.environ, turn=next(_turns)))

    def start(self) -> None:
        """Starts the daemon, and waits for the other ranks; raises like `Daemon.start`."""
        place = "" if self._child or self.config.alone else os.environ.get(presence.VARIABLE, "")
        presence.enter(place)
        try:
            self.daemon.start()
            self._desk.settle()
        except BaseException as error:
            self.daemon.abandon()
            self._desk.close()
            if isinstance(error, Exception):  # SystemExit and KeyboardInterrupt end the process inside `init`
                presence.tell(place, present=False)
            raise
        finally:
            if self.daemon.met:  # otherwise the error may have come on one rank alone
                self.operations.session = next(_sessions)
        several = self.daemon.world.size > 1
        self._presence = place if several else ""
        presence.tell(place, present=several)

    @property
    def daemon(self) -> Daemon:
        return self.operations.daemon

    def fail(self, reason: str, traceback: str, error: BaseException | None) -> bool:
        """Reports a failure to the other ranks unless another rank's failure caused it; returns whether it does."""
        news = not self.daemon.failing
        wrapped = self.operations.raised_in_graph
        if wrapped is not None and error is not None and str(wrapped) in str(error):
            error = wrapped
        if isinstance(error, ShutdownError) and error.ranks:
            self.daemon.fail(error.reason, culprit=error.ranks[0])
        elif isinstance(error, PeerError):
            await_own_end(error.reason)
        else:
            self.daemon.fail(reason, traceback)
        return news and self.daemon.failing and self.daemon.world.size > 1

    def leave(self) -> None:
        """Stops the daemon in step with the other ranks or, after a failure, after the rank that caused it."""
        if self.operations.uneven and not (self.daemon.failing or self.daemon.half_done):
            self._join()
        if not (self.daemon.failing or self.daemon.half_done):
            self.daemon.await_told(_TOLD_SECONDS)
        if self.daemon.failing or not self.daemon.stop():
            self._leave_the_wreck()
        self._desk.close()
        presence.tell(self._presence, present=False)

    def _join(self) -> None:
        """Contributes placeholders to the other ranks' operations until all of them have joined.

        Ranks outside an uneven process set may leave without a join: then those of the world fail, and that of the set
        counts.
        """
        world, joins = self.daemon.world, []
        sets = {each.members(rank=world.rank, size=world.size): each for each in self.operations.uneven}
        for each in ({(): global_process_set} | sets).values():
            with contextlib.suppress(CoorddError):  # leaving reports errors, here and below
                joins.append(self.operations.join(process_set=each))
        for join in joins:
            with contextlib.suppress(CoorddError):
                join.result()

    def _leave_the_wreck(self) -> None:
        """Lets the failed rank exit first, so that the launcher sees its exit code before those of the other ranks.

        The failed rank waits a moment until the other ranks have received its failure; they wait until its process is
        gone.
        """
        failure = self.daemon.blame(_LINGER_SECONDS)
        if failure.rank == self.daemon.world.rank:
            untold = _untold(failure.traceback)
            if untold or not _exits.told:
                log.error("the job has failed: this rank %s%s", failure.reason, untold)
            if not _exits.told:
                _exits.insist(1)
            threading.Event().wait(_HEARD_SECONDS)
        else:
            if failure.reason not in _exits.story:
                log.error("the job has failed: rank %d %s", failure.rank, failure.reason)
            self.daemon.wait_for_loss(failure.rank, _LINGER_SECONDS)
        if not self.daemon.end(_LINGER_SECONDS):
            os._exit(1)


def _untold(trace: str) -> str:
    """Returns a newline and this rank's traceback; "" if Python has printed it (a script may have caught the error)."""
    last = trace.rstrip().rpartition("\n")[2]
    return "" if last in _exits.story else f"\n{trace.rstrip()}"


def _fail(reason: str, traceback: str, error: BaseException | None) -> bool:
    return _default is not None and _default.pid == os.getpid() and _default.fail(reason, traceback, error)


_TELL_SECONDS = 2.0
_guard = threading.RLock()  # reentrant: a signal handler that runs during `init` may call `shutdown`
_forked_midway = False  # whether another thread of the parent was in `init` or `shutdown` when this process was forked
_sessions = itertools.count()
_turns = itertools.count(step=2)  # of the status servers: each uses two
# Created at import: ``sys.exit(main())`` looks the function up before ``main`` calls `init`.
_exits = ExitWatch(_fail, in_brief)
_default: _Default | None = None
_unfinished: list[Callable[[float], bool]] = []  # each waits for a thread that a failed `init` left behind
_launcher_variables: dict[str, str] = {}  # variables that `init` removed from the environment
_override: contextvars.ContextVar[Operations | None] = contextvars.ContextVar("coordd", default=None)


def init(**settings: Any) -> None:
    """Starts the daemon and waits for all ranks; does nothing if it already runs with these settings.

    Then it removes the MPI launcher's variables for this rank from ``os.environ``, because other libraries and child
    processes would take them for a world to connect to; see `launcher_variables`.

    Args:
        settings: fields of `coordd.config.Config`, such as ``fusion_mb=16``; they override the environment.

    Raises:
        ConfigError: a setting is invalid, or the daemon runs with other settings.
        StartError: the ranks did not find each other, or the environment names ranks that nothing connects.
        PeerError: another rank could not start.
        DeadlockError: the calling thread is a daemon's own thread, as in a done callback.
        ForkedProcessError: this process was forked from one that uses coordd.
        WorkerProcessError: this process is a worker that `multiprocessing` has started for a rank.
    """
    global _default  # noqa: PLW0603 - the only module-level state
    with _guard:
        if _forked_midway or (_default is not None and _default.pid != os.getpid()):
            raise ForkedProcessError
        if _is_worker():
            raise WorkerProcessError
        if _default is None:
            _refuse_after_exec()
            _default = _started(settings)
        elif _default.config != Config.load(os.environ, **settings):
            text = "init() was called before, with other settings: call shutdown() first, or leave them equal"
            raise ConfigError(text)


def _refuse_after_exec() -> None:
    """Rejects a program that a rank runs in its own place, as by `os.execv`: the rank's connections are gone.

    Raises:
        StartError: this is one.
    """
    if os.environ.get(RANK_PID) == str(os.getpid()):
        text = (
            "this program has replaced one that was a rank of a job: call coordd.shutdown() before os.exec, "
            "and the new program can call init()"
        )
        raise StartError(text)


def _started(settings: dict[str, Any]) -> _Default:
    """Creates and starts a daemon; reports an error of this rank to the other ranks, too."""
    begun = _prepared(settings)
    try:
        begun.start()
    except BaseException:
        _unfinished.append(begun.daemon.join)
        raise
    try:
        _log_to_stderr(begun.daemon.world.rank)
        _advise(begun.daemon)
        _exits.hear_sigterm()
    except BaseException as error:
        begun.daemon.fail(f"could not start: {brief(error)}", "".join(traceback.format_exception(error)))
        begun.daemon.end(_LINGER_SECONDS)
        raise
    atexit.register(_at_exit)
    os.environ.pop(RANK_PID, None)
    if begun.daemon.world.size > 1:
        os.environ[RANK_PID] = str(os.getpid())
    # With another transport the script may still initialise MPI itself, and Horovod scripts read these variables.
    if not (begun.config.alone or begun.config.as_horovod) and begun.config.transport in {"auto", "mpi"}:
        _take_variables()
    return begun


def _prepared(settings: dict[str, Any]) -> _Default:
    _await_unfinished()
    try:
        config = Config.load(os.environ, **settings)
        logging.getLogger("coordd").setLevel(config.log_level.upper())
        return _Default(config)
    except Exception as error:
        teller = tell(error)
        if teller is not None:
            teller.join(_TELL_SECONDS)  # the other ranks may not be in `init` yet; then the thread goes on
            _unfinished.append(lambda seconds: _joined(teller, seconds))
        raise


def _joined(thread: threading.Thread, seconds: float) -> bool:
    thread.join(seconds)
    return not thread.is_alive()


def _await_unfinished() -> None:
    """Waits until earlier attempts have left MPI: the messages of two attempts at once would be mixed up.

    Raises:
        StartError: an earlier attempt does not end.
    """
    seconds = Config.load({}).start_seconds
    while _unfinished:
        if not _unfinished[-1](seconds):
            text = (
                "a former init() that has failed still waits for the other ranks, and a new one cannot begin before "
                "they have come: end this process, or see why they do not call init()"
            )
            raise StartError(text)
        _unfinished.pop()


def _take_variables() -> None:
    """Removes the MPI launcher's variables for this process from the environment: libraries must not read them."""
    found = identifying(os.environ)
    _launcher_variables.update(found)
    for name in found:
        del os.environ[name]


def _return_variables() -> None:
    for name, value in _launcher_variables.items():
        os.environ.setdefault(name, value)
    _launcher_variables.clear()


def launcher_variables() -> dict[str, str]:
    """Returns the MPI launcher's variables for this rank, which `init` has removed from ``os.environ``.

    Pass them to a child process that needs them, such as a tool that reads ``OMPI_COMM_WORLD_RANK``, with
    ``env={**os.environ, **coordd.launcher_variables()}``. `shutdown` puts them back.
    """
    return dict(_launcher_variables)


def _of_a_rank() -> bool:
    """Returns whether this process is a program of its own that a rank, or a descendant of a rank, has started."""
    return os.environ.get(RANK_PID, here := str(os.getpid())) != here


def _is_worker() -> bool:
    """Returns whether this process is a worker that `multiprocessing` has started for a rank.

    While a worker imports the script, `multiprocessing` does not know its parent yet; there is only a mark by which
    that module refuses to start workers of workers. The process that forked it is the rank or the rank's fork server;
    the fork server gives it a name first.
    """
    if not _of_a_rank():
        return False
    rank = int(os.environ[RANK_PID])
    if (creator := multiprocessing.parent_process()) is not None:
        return creator.pid == rank
    process = multiprocessing.current_process()
    if not getattr(process, "_inheriting", False):
        return False
    parent = os.getppid()
    served = process.name != "MainProcess" and any("multiprocessing.forkserver" in word for word in sys.orig_argv)
    return rank == (parent_of(parent) if served else parent)


def shutdown() -> None:
    """Stops the daemon in step with the other ranks; does nothing if no daemon runs. `init` may be called again.

    A second thread that calls `shutdown` or `init` waits until the first call returns. If it is interrupted (Ctrl-C),
    it may be called again.

    Raises:
        DeadlockError: the calling thread is the daemon's own thread, as in a done callback.
    """
    global _default  # noqa: PLW0603 - as above
    if _default is not None:
        check_may_wait("shutdown()")
    with _guard:
        leaving, _default = _default, None
        if leaving is not None and leaving.pid == os.getpid():
            os.environ.pop(RANK_PID, None)
            _return_variables()
        _exits.forget_sigterm()
        if leaving is not None and leaving.pid == os.getpid():
            try:
                leaving.leave()
            except BaseException:  # otherwise the interpreter would exit while the thread still works
                _default = leaving
                raise
        atexit.unregister(_at_exit)


def _begin_anew() -> None:
    """Runs in a forked child: a thread that it does not have may have been in `init` or in `shutdown`."""
    global _guard, _forked_midway
    if _guard.acquire(blocking=False):
        _guard.release()
    else:
        _guard, _forked_midway = threading.RLock(), True


os.register_at_fork(after_in_child=_begin_anew)


def _at_exit() -> None:
    if _default is not None and _default.pid == os.getpid():
        _exits.verdict()
        shutdown()
    elif _default is None:
        with _guard:  # another thread may be in `shutdown`
            pass


def is_initialized() -> bool:
    """Returns whether operations can be used."""
    return _override.get() is not None or (_default is not None and _default.pid == os.getpid())


def operations() -> Operations:
    """Returns the operations of the default daemon; for plugins.

    Raises:
        NotInitializedError: before `init`, or after `shutdown`.
        ForkedProcessError: in a forked child.
    """
    if (override := _override.get()) is not None:
        return override
    if _default is None:
        raise NotInitializedError
    if _default.pid != os.getpid():
        raise ForkedProcessError
    return _default.operations


def source() -> Callable[[], Operations]:
    """Returns a function that returns the operations on any thread; for plugin functions that outlive this call.

    Raises:
        NotInitializedError: before `init`, or after `shutdown`.
    """
    operations()
    override = _override.get()
    return operations if override is None else lambda: override


@contextlib.contextmanager
def using(daemon: Daemon) -> Iterator[None]:
    """Makes another daemon the default of this thread; for ranks that are threads of one process."""
    token = _override.set(Operations(daemon))
    daemon.status.script = threading.get_ident()
    try:
        yield
    finally:
        _override.reset(token)


def rank() -> int:
    """Returns this process's rank, from 0."""
    return operations().daemon.world.rank


def size() -> int:
    """Returns the number of ranks."""
    return operations().daemon.world.size


def local_rank() -> int:
    """Returns this process's rank among the ranks of its host, from 0."""
    return operations().daemon.world.local_rank


def local_size() -> int:
    """Returns the number of ranks on this host."""
    return operations().daemon.world.local_size


def cross_rank() -> int:
    """Returns this host's index among the hosts that have this local rank."""
    return operations().daemon.world.cross_rank


def cross_size() -> int:
    """Returns the number of hosts that have this local rank."""
    return operations().daemon.world.cross_size


def is_homogeneous() -> bool:
    """Returns whether all hosts have the same number of ranks."""
    return operations().daemon.world.is_homogeneous


@refusable(Kind.ALLREDUCE, operations)
def allreduce(
    array: np.ndarray,
    *,
    name: str | None = None,
    op: ReduceOp = ReduceOp.AVERAGE,
    process_set: ProcessSet = global_process_set,
) -> np.ndarray:
    """Returns the reduction of an array over all ranks; the array itself does not change.

    Raises:
        ArgumentError, MismatchError, DuplicateNameError, PeerError, ShutdownError: see `coordd.errors`.
    """
    copy = np.array(array, order="C")
    result: np.ndarray = operations().allreduce(copy, name=name, op=op, process_set=process_set).result()
    return result


@refusable(Kind.BROADCAST, operations)
def broadcast(
    array: np.ndarray, root: int, *, name: str | None = None, process_set: ProcessSet = global_process_set
) -> np.ndarray:
    """Returns the root's array; raises like `allreduce`."""
    copy = np.array(array, order="C")
    result: np.ndarray = operations().broadcast(copy, root, name=name, process_set=process_set).result()
    return result


@refusable(Kind.ALLGATHER, operations)
def allgather(
    array: np.ndarray, *, name: str | None = None, process_set: ProcessSet = global_process_set
) -> np.ndarray:
    """Returns all ranks' arrays, concatenated along the first dimension; raises like `allreduce`."""
    result: np.ndarray = operations().allgather(np.asarray(array), name=name, process_set=process_set).result()
    return result


@refusable(Kind.BARRIER, operations)
def barrier(*, process_set: ProcessSet = global_process_set) -> None:
    """Waits until all ranks have called it; raises like `allreduce`."""
    handle: Handle[Any] = operations().barrier(process_set=process_set)
    handle.result()


def leaving() -> bool:
    """Returns, between two steps, whether to end training now because a batch system has sent SIGTERM to any rank.

    All ranks call it at the same place and get the same answer, so all finish the same step, save and leave with exit
    code 0. From the first call on SIGTERM no longer ends this process.

    Raises:
        ConfigError: other code handles this process's SIGTERM, or `init` was called in another thread.
        RefusedError: another rank has raised that `ConfigError`.
        PeerError, ShutdownError: see `coordd.errors`.
    """
    own = operations()
    with telling(own, Kind.ALLREDUCE, [_LEAVING]):
        if _override.get() is None and not _exits.heed_sigterm():
            text = (
                "leaving() cannot hear SIGTERM: call init() in the main thread, and set no handler of your own before "
                "or after it"
            )
            raise ConfigError(text)
    asked = np.array([_exits.asked], np.uint8)
    return bool(own.allreduce(asked, name=_LEAVING, op=ReduceOp.MAX).result()[0])


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:  # noqa: FBT001, FBT002 - Horovod's signature
    """Starts recording a timeline on all ranks: here at once, elsewhere on a message from this rank or on its own call.

    Args:
        file_path: a folder, which gets one file per rank; or a file ``x.json``, which is replaced by a folder ``x``;
            `coordd timeline` merges them into one file. Starts anew even if a recording is active.
        mark_cycles: whether to record the daemon's cycles, too.

    Raises:
        ArgumentError: the path is empty.
        PeerError, NotInitializedError: see `coordd.errors`.
    """
    folder = timeline_folder(os.fspath(file_path))
    if not folder:
        text = "start_timeline needs a folder to record in"
        raise ArgumentError(text)
    operations().daemon.start_timeline(folder, mark_cycles=mark_cycles)


def stop_timeline() -> None:
    """Ends the recording on all ranks; does nothing if there is none. This rank's file is complete on return.

    Raises:
        PeerError, NotInitializedError: see `coordd.errors`.
    """
    operations().daemon.stop_timeline()


def _advise(daemon: Daemon) -> None:
    """Warns once per job of unread settings, and once per host of too many threads, unless `coordd run` has."""
    world = daemon.world
    if world.rank == 0 and (told := aliased(os.environ)):
        log.info(told)
    if LAUNCHED in os.environ:
        return
    for sentence in unread(os.environ) if world.rank == 0 else ():
        log.warning(sentence)
    if world.size > 1 and world.local_rank == 0:
        advice = Crowd.of(daemon.neighbours, os.environ).advice
        if advice:
            log.warning(advice)


def _log_to_stderr(rank: int) -> None:
    """Prints coordd's warnings to stderr even if the script configures no logging."""
    if not log.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter(f"coordd rank {rank} %(levelname)s: %(message)s"))
        log.addHandler(handler)
        log.propagate = False
