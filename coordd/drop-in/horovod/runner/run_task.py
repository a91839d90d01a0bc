"""What each rank of `horovod.run` is: it fetches the function, calls it, and brings back what that returned."""

from __future__ import annotations

import os
import pickle
import sys
import traceback

from horovod.runner.exchange import connect, pickled

__all__: list[str] = []


def _main() -> None:
    rank = int(os.environ["HOROVOD_RANK"])
    with connect() as connection:
        work, path = connection.recv()
        sys.path += [folder for folder in path if folder not in sys.path]
        try:
            function, args, kwargs = pickle.loads(work)  # noqa: S301 - of the process that has started this one
            result = pickled(function(*args, **kwargs))
        except BaseException:
            connection.send((rank, False, traceback.format_exc().encode()))
            connection.recv()
            raise
        connection.send((rank, True, result))
        connection.recv()


if __name__ == "__main__":
    _main()
