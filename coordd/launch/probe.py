"""Queries the MPI library in a process of its own: ``python -m coordd.launch.probe``.

One rule: starting MPI can end the process or change it, so the calling process must not start MPI.
"""

from __future__ import annotations

import json
import sys

__all__ = ["main"]


def main() -> int:
    """Prints vendor, version, thread level and fault tolerance as JSON."""
    from mpi4py import MPI  # starts MPI

    levels = {
        MPI.THREAD_SINGLE: "single",
        MPI.THREAD_FUNNELED: "funneled",
        MPI.THREAD_SERIALIZED: "serialized",
        MPI.THREAD_MULTIPLE: "multiple",
    }
    vendor, version = MPI.get_vendor()
    facts = {
        "vendor": vendor,
        "version": ".".join(map(str, version)),
        "threads": levels[MPI.Query_thread()],
        # mpi4py always defines the name; a library without fault tolerance has no separate error class for it.
        "ulfm": MPI.ERR_PROC_FAILED != MPI.ERR_UNKNOWN,
    }
    sys.stdout.write(json.dumps(facts) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
