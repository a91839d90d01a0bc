"""The process's default daemon, and coordd without a framework: operations on NumPy arrays.

The only module-level state of coordd lives here.
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
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from coordd.config import LAUNCHED, Config, aliased, timeline_folder, unread
from coordd.crowd import Crowd
from coordd.daemon import Daemon
from coordd.errors import (
    ArgumentError,
    ConfigError,
    CoorddError,
    ForkedProcessError,
    NotInitializedError,
    PeerError,
    ShutdownError,
    WorkerProcessError,
)
from coordd.exits import ExitWatch, await_own_end
from coordd.handles import Handle
from coordd.messages import ReduceOp
from coordd.operations import Operations
from coordd.process_sets import ProcessSet, global_process_set
from coordd.rendezvous import meet
from coordd.survey.address import identity
from coordd.survey.desk import Desk
from coordd.testimony import in_brief

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


class _Default:
    """The default daemon, and how this process ends."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.pid = os.getpid()
        self.operations = Operations(Daemon(config, meet(config)))
        self._desk = Desk(self.daemon, identity(os.environ, turn=next(_turns)))
        try:
            self.daemon.start()
        except BaseException:
            self._desk.close()
            raise
        self._desk.settle()

    @property
    def daemon(self) -> Daemon:
        return self.operations.daemon

    def fail(self, reason: str, traceback: str, error: BaseException | None) -> bool:
        """Tells the others, unless this failure is but a consequence of another rank's; says whether it does."""
        news = not self.daemon.failing
        if isinstance(error, ShutdownError) and error.ranks:
            self.daemon.fail(error.reason, culprit=error.ranks[0])
        elif isinstance(error, PeerError):
            await_own_end(error.reason)
        else:
            self.daemon.fail(reason, traceback)
        return news and self.daemon.failing and self.daemon.world.size > 1

    def leave(self) -> None:
        """Ends the daemon in step with the others or, after a failure, so that its cause is seen first."""
        if self.operations.uneven and not self.daemon.failing:
            with contextlib.suppress(CoorddError):  # what is wrong is told by leaving
                self.operations.join().result()
        if self.daemon.failing or not self.daemon.stop():
            self._leave_the_wreck()
        self._desk.close()

    def _leave_the_wreck(self) -> None:
        """Lets the culprit go first, so that the launcher sees its exit code before its consequences'.

        The culprit waits a moment until the others have heard of it; they wait until its process is gone.
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
    """Returns this rank's traceback, on a new line, unless Python has shown it: a script may have caught the error."""
    last = trace.rstrip().rpartition("\n")[2]
    return "" if last in _exits.story else f"\n{trace.rstrip()}"


def _fail(reason: str, traceback: str, error: BaseException | None) -> bool:
    return _default is not None and _default.pid == os.getpid() and _default.fail(reason, traceback, error)


_RANK_PID = "_COORDD_RANK_PID"  # inherited by a rank's workers, which are no ranks
_guard = threading.Lock()
_turns = itertools.count(step=2)  # of the desks: each uses two
# Set up at import, for in ``sys.exit(main())`` the function is looked up before ``main`` calls `init`.
_exits = ExitWatch(_fail, in_brief)
_default: _Default | None = None
_override: contextvars.ContextVar[Operations | None] = contextvars.ContextVar("coordd", default=None)


def init(**settings: Any) -> None:
    """Starts the daemon and waits until all ranks are there; does nothing if it runs with these settings already.

    Args:
        settings: fields of `coordd.config.Config`, such as ``fusion_mb=16``; they beat the environment.

    Raises:
        ConfigError: a setting is unusable, or the daemon runs with other settings.
        StartError: the ranks did not find each other.
        ForkedProcessError: this process was forked from one that uses coordd.
    """
    global _default  # noqa: PLW0603 - the one piece of module-level state
    with _guard:
        if _default is not None and _default.pid != os.getpid():
            raise ForkedProcessError
        if os.environ.get(_RANK_PID, here := str(os.getpid())) != here and _is_worker():
            raise WorkerProcessError
        config = Config.load(os.environ, **settings)
        logging.getLogger("coordd").setLevel(config.log_level.upper())
        if _default is None:
            _default = _Default(config)
            _log_to_stderr(_default.daemon.world.rank)
            _advise(_default.daemon)
            atexit.register(_at_exit)
            _exits.hear_sigterm()
            if _default.daemon.world.size > 1:
                os.environ[_RANK_PID] = str(os.getpid())
        elif _default.config != config:
            text = "init() was called before, with other settings: call shutdown() first, or leave them equal"
            raise ConfigError(text)


def _is_worker() -> bool:
    """Says whether this process was started by `multiprocessing`; while it imports the script, that tells only so."""
    return multiprocessing.parent_process() is not None or "__mp_main__" in sys.modules


def shutdown() -> None:
    """Ends the daemon in step with the other ranks; `init` may be called again. Does nothing if it does not run."""
    global _default
    with _guard:
        leaving, _default = _default, None
        os.environ.pop(_RANK_PID, None)
    atexit.unregister(_at_exit)
    _exits.forget_sigterm()
    if leaving is not None and leaving.pid == os.getpid():
        leaving.leave()


def _at_exit() -> None:
    if _default is not None and _default.pid == os.getpid():
        _exits.verdict()
        shutdown()


def is_initialized() -> bool:
    """Says whether operations can be used."""
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
    """Returns what gives the operations later, on any thread; for plugins whose functions outlive this call.

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
    """Returns this process's place among the ranks of its host, from 0."""
    return operations().daemon.world.local_rank


def local_size() -> int:
    """Returns the number of ranks on this host."""
    return operations().daemon.world.local_size


def cross_rank() -> int:
    """Returns the place of this host among those that have this local rank."""
    return operations().daemon.world.cross_rank


def cross_size() -> int:
    """Returns the number of hosts that have this local rank."""
    return operations().daemon.world.cross_size


def is_homogeneous() -> bool:
    """Says whether all hosts have the same number of ranks."""
    return operations().daemon.world.is_homogeneous


def allreduce(
    array: np.ndarray,
    *,
    name: str | None = None,
    op: ReduceOp = ReduceOp.AVERAGE,
    process_set: ProcessSet = global_process_set,
) -> np.ndarray:
    """Returns the reduction of an array over all ranks; the array itself stays as it is.

    Raises:
        ArgumentError, MismatchError, DuplicateNameError, PeerError, ShutdownError: see `coordd.errors`.
    """
    copy = np.array(array, order="C")
    result: np.ndarray = operations().allreduce(copy, name=name, op=op, process_set=process_set).result()
    return result


def broadcast(
    array: np.ndarray, root: int, *, name: str | None = None, process_set: ProcessSet = global_process_set
) -> np.ndarray:
    """Returns the root's array; raises like `allreduce`."""
    copy = np.array(array, order="C")
    result: np.ndarray = operations().broadcast(copy, root, name=name, process_set=process_set).result()
    return result


def allgather(
    array: np.ndarray, *, name: str | None = None, process_set: ProcessSet = global_process_set
) -> np.ndarray:
    """Returns all ranks' arrays, joined along the first dimension; raises like `allreduce`."""
    result: np.ndarray = operations().allgather(np.asarray(array), name=name, process_set=process_set).result()
    return result


def barrier(*, process_set: ProcessSet = global_process_set) -> None:
    """Waits until all ranks have come; raises like `allreduce`."""
    handle: Handle[Any] = operations().barrier(process_set=process_set)
    handle.result()


def leaving() -> bool:
    """Says between two steps whether to end training now, because a batch system has sent SIGTERM to any rank.

    All ranks call it at the same place and get the same answer, so all finish the same step, save and leave with exit
    code 0. From the first call on SIGTERM does not end this process any more.

    Raises:
        ConfigError: this process's SIGTERM is handled by something else, or `init` was called in another thread.
        PeerError, ShutdownError: see `coordd.errors`.
    """
    own = operations()
    if _override.get() is None and not _exits.heed_sigterm():
        text = (
            "leaving() cannot hear SIGTERM: call init() in the main thread, and set no handler of your own before or "
            "after it"
        )
        raise ConfigError(text)
    asked = np.array([_exits.asked], np.uint8)
    return bool(own.allreduce(asked, name="coordd.leaving", op=ReduceOp.MAX).result()[0])


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:  # noqa: FBT001, FBT002 - Horovod's signature
    """Records a timeline from now on, on this rank at once, on the others when they hear of it or call it themselves.

    Args:
        file_path: a folder, which gets one file a rank, or a file, ``x.json``, in whose place there will be a folder
            ``x``; `coordd timeline` makes one file of it. It begins anew, even if something is being recorded.
        mark_cycles: whether to record the daemon's cycles, too.

    Raises:
        ArgumentError: there is no path.
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
    """Warns once a job of settings that nobody reads, and once a host of too many threads, unless `coordd run` has."""
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
    """Shows coordd's warnings even where the script configures no logging."""
    if not log.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter(f"coordd rank {rank} %(levelname)s: %(message)s"))
        log.addHandler(handler)
        log.propagate = False
