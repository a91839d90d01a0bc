"""`horovod.run`: calls a function on several ranks, and returns what each call returned."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from coordd.errors import ArgumentError
from horovod.refused import SAME_RANKS
from horovod.runner.exchange import Exchange, pickled

__all__ = ["run"]

_DEPRECATED = {
    "np": "np is deprecated, use num_proc instead",
    "min_np": "min_np is deprecated, use min_num_proc instead",
    "max_np": "max_np is deprecated, use max_num_proc instead",
    "network_interface": "network_interface is deprecated, use network_interfaces instead",
}
"""In Horovod's words, by which users filter warnings."""
_ELASTIC = ("slots", "reset_limit", "cooldown_range", "host_discovery_script")
_RANK_PID = "_COORDD_RANK_PID"  # of this process, if it is a rank itself; the ranks that are started here are others
_END_SECONDS = 30.0


def run(  # noqa: PLR0913, PLR0917 - Horovod's signature
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: Any = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    host_discovery_script: str | None = None,
    start_timeout: float | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | None = None,
    verbose: bool | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    network_interfaces: Sequence[str] | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
) -> list[Any]:
    """Calls ``func(*args, **kwargs)`` on every rank of a new job, by `coordd run --as-horovod`.

    Args:
        func: what to call. It is pickled: by cloudpickle where that is installed, which takes lambdas and functions
            of the script itself; else it must be in a module that ranks can import.
        args: its arguments.
        kwargs: its arguments by name.
        num_proc: number of ranks.
        min_num_proc: as ``max_num_proc``: ``num_proc``, or not given; the ranks of a job stay the same.
        max_num_proc: see ``min_num_proc``.
        slots: of elastic jobs; refused, as are ``reset_limit``, ``cooldown_range`` and ``host_discovery_script``.
        reset_limit: see ``slots``.
        cooldown_range: see ``slots``.
        hosts: as ``a:2,b:2``; by default this machine.
        hostfile: the same as a file.
        host_discovery_script: see ``slots``.
        start_timeout: seconds that ranks wait for each other in `init`.
        ssh_port: of the hosts.
        ssh_identity_file: a private key.
        disable_cache: Horovod's; nothing is cached.
        output_filename: folder into which the output of each rank is written, too.
        verbose: whether coordd logs what it does.
        use_gloo: Horovod's; coordd chooses the transport itself.
        use_mpi: the same.
        mpi_args: more arguments for the MPI launcher.
        network_interface: old form of ``network_interfaces``.
        network_interfaces: on which rank 0 listens; the first counts.
        executable: the interpreter of the ranks; by default this one.
        np: old form of ``num_proc``.
        min_np: old form of ``min_num_proc``.
        max_np: old form of ``max_num_proc``.

    Returns:
        what each rank's call returned, in the order of ranks.

    Raises:
        ArgumentError: arguments that exclude each other, or are of elastic jobs; it is a ValueError.
        RuntimeError: the job has failed, or a rank ended without a result; it has the first rank's traceback.
    """
    given = {"np": np, "min_np": min_np, "max_np": max_np, "network_interface": network_interface}
    for name in (name for name, value in given.items() if value is not None):
        warnings.warn(_DEPRECATED[name], DeprecationWarning, stacklevel=2)
    num_proc = num_proc if np is None else np
    least = min_num_proc if min_np is None else min_np
    most = max_num_proc if max_np is None else max_np
    elastic = dict(zip(_ELASTIC, (slots, reset_limit, cooldown_range, host_discovery_script), strict=True))
    _check(num_proc, (least, most), elastic)
    if hosts is not None and hostfile is not None:
        raise ArgumentError("Argument hosts and hostfile only allow one provided.")
    if use_gloo and use_mpi:
        raise ArgumentError("Argument use_gloo and use_mpi only allow one set True.")
    interfaces = network_interface.split(",") if network_interface else list(network_interfaces or ())
    flags = {
        "-H": hosts,
        "--hostfile": hostfile,
        "--start-timeout": start_timeout,
        "--ssh-port": ssh_port,
        "--ssh-identity-file": ssh_identity_file,
        "--output-filename": output_filename,
        "--network-interfaces": interfaces[0] if interfaces else None,
    }
    words = ["-np", str(num_proc)]
    words += [word for flag, value in flags.items() if value is not None for word in (flag, str(value))]
    switches = {"--disable-cache": disable_cache, "--verbose": verbose, "--gloo": use_gloo, "--mpi": use_mpi}
    words += [flag for flag, wanted in switches.items() if wanted]
    words += [f"--mpi-args={mpi_args}"] if mpi_args else []
    work = pickled((func, tuple(args), dict(kwargs or {})))
    return _launch(work, words, num_proc, python=executable or sys.executable, remote=bool(hosts or hostfile))


def _check(size: int, bounds: tuple[int | None, int | None], elastic: Mapping[str, Any]) -> None:
    asked = [name for name, value in elastic.items() if value is not None]
    asked += ["min_num_proc or max_num_proc"] if any(bound not in {None, size} for bound in bounds) else []
    if asked:
        text = f"horovod.run({', '.join(asked)}) is refused: {SAME_RANKS}"
        raise ArgumentError(text)


def _launch(work: bytes, words: Sequence[str], size: int, *, python: str, remote: bool) -> list[Any]:
    """Runs a job whose ranks fetch the function from here, and bring back what it returns."""
    with Exchange(work, sys.path, remote=remote) as exchange:
        environment = {name: value for name, value in os.environ.items() if name != _RANK_PID} | exchange.variables
        names = [word for name in exchange.variables for word in ("-x", name)]
        launcher = [sys.executable, "-m", "coordd.launch.cli", "run", "--as-horovod", *words, *names]
        job = subprocess.Popen([*launcher, python, "-m", "horovod.runner.run_task"], env=environment)
        try:
            status = job.wait()
        except BaseException:
            job.terminate()
            try:
                job.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                job.kill()
            raise
        return exchange.results(size, status)
