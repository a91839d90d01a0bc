"""The launchers that we can drive: what each is called and which flags it understands.

One rule: everything here is a pure function of a `Launch`; the tests hold a table of command lines. Binding is always
switched off, because each rank binds itself, alike under every launcher (see `coordd.launch.shares`).
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from coordd.errors import ConfigError
from coordd.launch.hosts import Host

__all__ = ["ALONE", "FLAVOURS", "HYDRA", "INTEL", "OPEN_MPI", "SLURM", "Flavour", "Launch", "recognise"]


_LOGIN = ("HOME", "LOGNAME", "SHELL", "USER")  # what a login gives under other launchers


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What an MPI launcher is asked for.

    Attributes:
        size: number of ranks.
        command: what each rank's process is.
        hosts: hosts with the ranks that each gets; empty means this host, or those of the batch system.
        forwarded: names of the environment variables that other hosts get too.
        oversubscribed: there are more ranks than cores here.
        root: we are the superuser.
        extra: arguments for the launcher, given by the user.
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
    """A kind of launcher.

    Attributes:
        name: for people.
        style: how it tells a process its rank, see `coordd.launch.place`.
        programs: names of the executable, the better one first.
        version: finds the version in what ``--version`` prints, and recognises the kind by it.
        flags: composes the arguments.
        interrupt: the signal to it that reaches the ranks as a wish to interrupt, without further effects.
        terminate: the same as a wish to terminate.
        passes: other signals that it passes on to the ranks.
        finish: the signal to it that ends every rank, even one that ignores signals; the kernel sends it for us if
            we are killed.
        pmi: what Slurm calls the way in which programs of this kind find each other.
        ssh: variables that hold more arguments for ssh, in its versions; none if it does not reach hosts by ssh.
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
    """Finds the kind and version of a launcher in what its ``--version`` prints."""
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
    """Intel MPI takes slots per host only from a file or, as here, as one part of the command line for each host."""
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
    programs=("mpiexec.hydra",),  # its mpirun is a shell script, which keeps our signals to itself
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
    interrupt=signal.SIGUSR2,  # all that it forwards but SIGUSR1, which is the user's; and to every process of a rank
    terminate=signal.SIGUSR2,
    passes=(signal.SIGUSR1,),
    finish=signal.SIGINT,  # thanks to --quit-on-interrupt
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
