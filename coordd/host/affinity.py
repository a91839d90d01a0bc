"""CPU affinity: reads and writes CPU lists, and pins the calling thread.

CPUs have the numbers that the kernel gives them, hyper-threads included, as in ``taskset -c``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping

from coordd.errors import ConfigError, spans

__all__ = ["DAEMON_CORES", "daemon_cores", "keep_to", "read_cpus", "write_cpus"]

DAEMON_CORES = "COORDD_DAEMON_CORES"  # the setting's variable, for modules that must not import `coordd.config`

_LEGAL = "processors as the kernel numbers them, such as 3 or 6-7 or 0,4-5, or empty for any"
_SPAN = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?", re.ASCII)


def daemon_cores(environment: Mapping[str, str]) -> frozenset[int]:
    """Reads the CPUs for the daemons from coordd's or Horovod's variable; empty if neither is set.

    Raises:
        ConfigError: the variable is not a CPU list.
    """
    for variable in (DAEMON_CORES, "HOROVOD_THREAD_AFFINITY"):
        if text := environment.get(variable, "").strip():
            return read_cpus(text, source=variable)
    return frozenset()


def keep_to(text: str, *, source: str = "daemon_cores") -> None:
    """Pins the calling thread, and the threads that it starts, to a list of CPUs; empty text changes nothing.

    Raises:
        ConfigError: the text is no CPU list, or names CPUs that this process may not use.
    """
    if not text:
        return
    cpus = read_cpus(text, source=source)
    try:
        os.sched_setaffinity(0, cpus)
        kept = os.sched_getaffinity(0) == cpus  # the kernel silently drops CPUs that a container does not have
    except (AttributeError, OSError):  # not Linux; no such CPU, or not allowed
        kept = False
    if not kept:
        raise ConfigError.illegal(source, text, "processors that this process may use, or leave it empty for any")


def read_cpus(text: str, *, source: str) -> frozenset[int]:
    """Parses a CPU list such as ``0,4-5``, in the format of the kernel and ``taskset -c``.

    Raises:
        ConfigError: the format is wrong; the message names ``source``.
    """
    cpus: set[int] = set()
    for piece in text.split(","):
        found = _SPAN.fullmatch(piece.strip())
        span = range(int(found[1]), int(found[2] or found[1]) + 1) if found else range(0)
        if not span:
            raise ConfigError.illegal(source, text, _LEGAL)
        cpus.update(span)
    return frozenset(cpus)


def write_cpus(cpus: Iterable[int]) -> str:
    """Formats CPUs as a list that `read_cpus` parses."""
    return spans(cpus).replace(" ", "")
