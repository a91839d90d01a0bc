"""The supported MPI launchers: their names and flags.

One rule: command lines are pure functions of a `Launch`; the tests hold a table of command lines. The launcher's
binding is always switched off, because each rank binds itself in the same way under every launcher
(see `coordd.launch.shares`).
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from coordd.errors import ConfigError
from coordd.launch.hosts import Host

__all__ = ["ALONE", "FLAVOURS", "HYDRA", "INTEL", "OPEN_MPI", "SLURM", "Flavour", "Launch", "recognise"]


_LOGIN = ("HOME", "LOGNAME", "SHELL", "USER")  # variables that a login sets under other launchers


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A request to an MPI launcher.

    Attributes:
        size: number of ranks.
        command: command line of each rank's process.
        hosts: hosts with the number of ranks on each; empty means this host, or the hosts of the batch system.
        forwarded: names of the environment variables that are forwarded to other hosts.
        oversubscribed: whether this host has fewer cores than ranks.
        root: whether this process runs as the superuser.
        extra: the user's arguments for the launcher.
    """

    size: int
    command: Sequence[str]
    hosts: tuple[Host, ...] = ()
    forwarded: tuple[str, ...] = ()
    oversubscribed: bool = False
    root: bool = False
    extra: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Flavour:
    """A kind of MPI launcher.

    Attributes:
        name: display name.
        style: the environment variables in which it passes a process its rank, see `coordd.launch.place`.
        programs: names of the executable, in order of preference.
        version: pattern of the version in the output of ``--version``; also identifies the kind.
        flags: returns the arguments for a `Launch`.
        interrupt: the signal to the launcher that reaches the ranks as an interrupt request, without side effects.
        terminate: the signal to the launcher that reaches the ranks as a termination request.
        passes: other signals that the launcher forwards to the ranks.
        finish: the signal to the launcher that ends all ranks, even a rank that ignores signals; the kernel sends it
            if this process is killed.
        pmi: Slurm's name of the PMI variant that this MPI uses.
        ssh: variables that hold additional arguments for ssh, over its versions; empty if it does not use ssh.
    """

    name: str
    style: str
    programs: tuple[str, ...]
    version: re.Pattern[str]
    flags: Callable[[Launch], list[str]]
    interrupt: signal.Signals
    terminate: signal.Signals
    passes: tuple[signal.Signals, ...]
    finish: signal.Signals
    pmi: str = ""
    ssh: tuple[str, ...] = ()


def recognise(told: str) -> tuple[Flavour, str] | None:
    """Returns the kind and version of a launcher from its ``--version`` output, or None."""
    for flavour in FLAVOURS:
        if found := flavour.version.search(told):
            return flavour, found[1]
    return None


def _open_mpi(launch: Launch) -> list[str]:
    flags = ["-n", str(launch.size)]
    if launch.root:
        flags += ["--allow-run-as-root"]
    if launch.hosts:
        flags += ["--host", _colons(launch), "--map-by", "slot"]
    if launch.oversubscribed:
        flags += ["--oversubscribe", "--mca", "mpi_yield_when_idle", "1"]
    flags += ["--bind-to", "none"]
    for name in launch.forwarded:
        flags += ["-x", name]
    return [*flags, *launch.extra, *launch.command]


def _hydra(launch: Launch) -> list[str]:
    hosts = ["-hosts", _colons(launch)] if launch.hosts else []
    return [*_forwarded(launch), "-bind-to", "none", *launch.extra, *hosts, "-n", str(launch.size), *launch.command]


def _intel(launch: Launch) -> list[str]:
    """Returns Intel MPI's arguments.

    Intel MPI takes slots per host only from a file or, as here, as one section of the command line per host.
    """
    flags = [*_forwarded(launch), "-genv", "I_MPI_PIN", "0", *launch.extra]
    if not launch.hosts:
        return [*flags, "-n", str(launch.size), *launch.command]
    for number, host in enumerate(launch.hosts):
        flags += [":"] * bool(number) + ["-host", host.name, "-n", str(host.slots), *launch.command]
    return flags


def _slurm(launch: Launch) -> list[str]:
    flags = [f"--ntasks={launch.size}", "--unbuffered", "--quit-on-interrupt", "--cpu-bind=none"]
    if launch.hosts:
        per_host = {host.slots for host in launch.hosts}
        if len(per_host) > 1:
            raise ConfigError.illegal("--hosts", _colons(launch), "the same number of ranks for every host under srun")
        flags += [f"--nodelist={','.join(host.name for host in launch.hosts)}", f"--nodes={len(launch.hosts)}"]
        flags += [f"--ntasks-per-node={per_host.pop()}"]
    if launch.oversubscribed:
        flags += ["--overcommit"]
    if launch.forwarded:
        flags += [f"--export={','.join((*launch.forwarded, *_LOGIN))}"]
    return [*flags, *launch.extra, *launch.command]


def _colons(launch: Launch) -> str:
    return ",".join(map(str, launch.hosts))


def _forwarded(launch: Launch) -> list[str]:
    return ["-genvlist", ",".join(launch.forwarded)] if launch.forwarded else []


OPEN_MPI = Flavour(
    name="Open MPI",
    style="open-mpi",
    programs=("mpirun", "mpiexec"),
    version=re.compile(r"\((?:Open MPI|OpenRTE)\) v?(\S+)"),
    flags=_open_mpi,
    interrupt=signal.SIGALRM,
    terminate=signal.SIGURG,
    passes=(signal.SIGUSR1, signal.SIGUSR2),
    finish=signal.SIGTERM,
    pmi="pmix",
    ssh=("PRTE_MCA_plm_ssh_args", "OMPI_MCA_plm_rsh_args"),  # from 5 on; up to 4
)
INTEL = Flavour(
    name="Intel MPI",
    style="hydra",
    programs=("mpiexec.hydra",),  # its mpirun is a shell script that does not forward signals
    version=re.compile(r"Intel\(R\) MPI Library[^,]*, Version (\S+(?: Update \d+)?)"),
    flags=_intel,
    interrupt=signal.SIGINT,
    terminate=signal.SIGTERM,
    passes=(signal.SIGUSR1,),
    finish=signal.SIGKILL,
    pmi="pmi2",
    ssh=("I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS",),
)
HYDRA = Flavour(
    name="MPICH",
    style="hydra",
    programs=("mpiexec.hydra", "mpiexec", "mpirun"),
    version=re.compile(r"HYDRA build details:\s+Version:\s+(\S+)"),
    flags=_hydra,
    interrupt=signal.SIGINT,
    terminate=signal.SIGTERM,
    passes=(signal.SIGUSR1,),
    finish=signal.SIGKILL,
    pmi="pmi2",
    ssh=("HYDRA_LAUNCHER_EXTRA_ARGS",),
)
SLURM = Flavour(
    name="Slurm",
    style="slurm",
    programs=("srun",),
    version=re.compile(r"^slurm(?:-wlm)? (\S+)", re.MULTILINE),
    flags=_slurm,
    # Slurm forwards only SIGUSR2 and SIGUSR1, which is the user's, and sends them to every process of a rank.
    interrupt=signal.SIGUSR2,
    terminate=signal.SIGUSR2,
    passes=(signal.SIGUSR1,),
    finish=signal.SIGINT,  # ends all ranks because of --quit-on-interrupt
)
ALONE = Flavour(
    name="no launcher",
    style="alone",
    programs=(),
    version=re.compile(r"(?!)"),
    flags=lambda launch: list(launch.command),
    interrupt=signal.SIGINT,
    terminate=signal.SIGTERM,
    passes=(signal.SIGUSR1, signal.SIGUSR2),
    finish=signal.SIGHUP,
)
FLAVOURS = (OPEN_MPI, INTEL, HYDRA, SLURM)
