"""Asks the MPI library about itself, in a process of its own: ``python -m coordd.launch.probe``.

One rule: whatever starting MPI does to a process, up to ending it, must not happen to the one that asks.
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
        # mpi4py has the names everywhere; a library without fault tolerance has no error class of its own for them.
        "ulfm": MPI.ERR_PROC_FAILED != MPI.ERR_UNKNOWN,
    }
    sys.stdout.write(json.dumps(facts) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
