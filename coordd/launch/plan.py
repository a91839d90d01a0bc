"""The plan of `coordd run`, computed before any process is started."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from coordd.config import Config, unread
from coordd.errors import ConfigError
from coordd.host.cores import Cores
from coordd.host.launcher_environment import RANK_PID, launched_ranks, more_ranks
from coordd.launch import drop_in, horovodrun
from coordd.launch.environment import assignments, forwarded
from coordd.launch.hosts import Host, place_ranks
from coordd.launch.job import Program
from coordd.launch.launcher import Launcher, LauncherError, home
from coordd.launch.mpi_flavours import ALONE, SLURM, Flavour, Launch
from coordd.launch.options import command_of, extra_of, hosts_of, knob_variables
from coordd.launch.rank import Order
from coordd.launch.shares import Wish, describe
from coordd.transport.registry import require

__all__ = ["Plan"]

# Variables that show that a batch system has reserved hosts, which the MPI launcher knows.
_RESERVED = ("SLURM_JOB_ID", "PBS_NODEFILE", "LSB_DJOB_HOSTFILE", "LOADL_PID")


@dataclass(frozen=True)
class Plan:
    """A launcher's command line with its environment, settings and notes.

    Attributes:
        size: number of ranks.
        program: the command line, with its environment.
        settings: the part of the environment that the options set.
        notes: how the ranks share the cores, and notes on the settings for the user; one line each.
        local: whether all ranks are on this host.
    """

    size: int
    program: Program
    settings: Mapping[str, str]
    notes: tuple[str, ...]
    local: bool = False

    @classmethod
    def of(cls, options: argparse.Namespace, environment: Mapping[str, str], cores: Cores) -> Plan:
        """Computes the plan.

        Args:
            options: the parsed options of `coordd.launch.options`.
            environment: usually ``os.environ``.
            cores: the cores of this host.

        Raises:
            ConfigError: an option is invalid, or options contradict each other.
            LauncherError: no launcher can start that many ranks.
        """
        command = command_of(options)
        size, hosts = _where(options, environment)
        settings = {**_settings(options, environment), **assignments(options.env, environment)}
        inherited = {**environment, "PATH": _path(environment), **home(environment), **settings}
        _check(inherited, size, given=options.transport)
        if size > 1:  # COORDD_ALONE applies to the job, not to each of its ranks
            for variables in (settings, inherited):
                variables.pop("COORDD_ALONE", None)
        here = not hosts and not any(name in environment for name in _RESERVED)
        launcher = _launcher(options.launcher, needed=size > 1 or not here)
        flavour = launcher.flavour if launcher else ALONE
        local = here or bool(hosts and all(host.is_here for host in hosts))
        ssh, unneeded = _ssh(horovodrun.ssh_words(options), flavour, inherited, local=local)
        order = Order(command, flavour.style, options.threads, options.bind, horovodrun.as_horovod(options))
        launch = Launch(
            size=size,
            command=(sys.executable, "-m", "coordd.launch.rank", *order.arguments),
            hosts=hosts,
            forwarded=() if here else forwarded(inherited, settings),
            oversubscribed=here and size > len(cores.threads),
            root=os.geteuid() == 0,
            extra=(*_pmi(flavour, options.mpi_args), *extra_of(options)),
        )
        argv = [*([str(launcher.path)] if launcher else []), *flavour.flags(launch)]
        title = launcher.title if launcher else "rank 0"
        wish = Wish.of(options.threads, inherited)
        note = describe(cores, size, wish, bind=options.bind and size > 1) if here else _elsewhere(size, hosts)
        told = (note, *_left_aside(options), *unneeded, *unread(inherited))
        return cls(size, Program(argv, {**inherited, **ssh}, flavour, title), {**settings, **ssh}, told, local)

    def __str__(self) -> str:
        """Returns the command line in shell syntax."""
        settings = [f"{name}={shlex.quote(value)}" for name, value in self.settings.items()]
        return " ".join([*settings, shlex.join(self.program.argv)])


def _settings(options: argparse.Namespace, environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that options other than ``--env`` set."""
    path = {"PYTHONPATH": drop_in.python_path(environment)} if horovodrun.as_horovod(options) else {}
    return {**path, **horovodrun.variables(options), **knob_variables(options)}


def _left_aside(options: argparse.Namespace) -> tuple[str, ...]:
    """Returns notes on what ``--as-horovod`` makes ineffective: an installed Horovod, and some flags of horovodrun."""
    return (*drop_in.overshadowed(), *horovodrun.notes(options)) if horovodrun.as_horovod(options) else ()


def _check(environment: Mapping[str, str], size: int, *, given: str | None) -> None:
    """Rejects settings that ranks would reject, before they start, and settings that would leave each rank alone."""
    config = Config.load(environment)
    _refuse_to_be_started_often(environment, alone=config.alone)
    source = "--transport" if given else "COORDD_TRANSPORT"
    require(config.transport, source=source)
    if size > 1 and config.transport == "local":
        raise ConfigError(f"{source}=local is for one rank, which finds no others: leave it out to start {size}")


def _refuse_to_be_started_often(environment: Mapping[str, str], *, alone: bool) -> None:
    """Refuses to start one job per process of an outer launcher; a job that a rank starts is intended."""
    if alone or RANK_PID in environment or launched_ranks(environment):
        return
    claim = more_ranks(environment, 1)
    if claim is not None:
        raise ConfigError(
            f"{claim.variable}={claim.value[:200]} says that {claim.launcher} has started {claim.ranks} processes or "
            "more, and each would start a job of its own: start `coordd run` once, or set COORDD_ALONE=1 to have that"
        )


def _where(options: argparse.Namespace, environment: Mapping[str, str]) -> tuple[int, tuple[Host, ...]]:
    """Returns the number of ranks, and the hosts with the number of ranks on each."""
    hosts = hosts_of(options)
    size = options.size or sum(host.slots for host in hosts) or int(environment.get("SLURM_NTASKS", "0"))
    if not size:
        raise ConfigError("how many ranks? say -n, as in 'coordd run -n 2 python train.py', or --hosts a:4,b:4")
    return size, place_ranks(size, hosts) if hosts else ()


def _path(environment: Mapping[str, str]) -> str:
    """Returns PATH such that ``python`` is this interpreter even if its virtual environment is not activated."""
    folders = environment.get("PATH", os.defpath).split(os.pathsep)
    own = str(Path(sys.executable).parent)
    if sys.prefix != sys.base_prefix and own not in folders:
        folders.insert(0, own)
    return os.pathsep.join(folders)


def _launcher(name: str, *, needed: bool) -> Launcher | None:
    """Finds the launcher; a single rank on this host needs none."""
    if name != "auto":
        return Launcher.named(name)
    return Launcher.find() if needed else None


def _ssh(
    words: Sequence[str], flavour: Flavour, environment: Mapping[str, str], *, local: bool
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Returns the variables that pass these arguments to the launcher's ssh, or a note that no other host is used.

    Raises:
        ConfigError: the launcher does not use ssh.
    """
    said = " ".join(words)
    if not words or local:
        return {}, (f"{said}: all ranks are on this host, which needs no ssh",) if words else ()
    if not flavour.ssh:
        raise ConfigError(f"{said} is for ssh, and {flavour.name} reaches hosts without it: leave it out")
    return {name: f"{environment.get(name, '')} {said}".strip() for name in flavour.ssh}, ()


def _pmi(flavour: Flavour, given: str) -> tuple[str, ...]:
    """Returns Slurm's option for the PMI, unless the user gives it; with a wrong PMI each rank would be alone."""
    if flavour is not SLURM or "--mpi" in given:
        return ()
    try:
        return (f"--mpi={Launcher.find().flavour.pmi}",)
    except LauncherError:  # an MPI library without its launcher: use the site's default
        return ()


def _elsewhere(size: int, hosts: tuple[Host, ...]) -> str:
    where = ", ".join(map(str, hosts)) or "the hosts of this reservation"
    return f"{size} rank{'s' * (size > 1)} on {where}; each host divides its cores among its ranks"
