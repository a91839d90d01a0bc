"""What holds for every test: the surroundings in which pytest was started do not reach it."""

from __future__ import annotations

import os
import signal
import sys

import pytest
from hypothesis import settings

# Knobs, and the variables by which a process knows that an MPI launcher or Slurm has started it.
_FOREIGN = ("COORDD_", "HOROVOD_", "OMPI_COMM_WORLD_", "PMI_", "PMIX_", "SLURM_")

for _name in [name for name in os.environ if name.startswith(_FOREIGN)]:
    del os.environ[_name]

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background, and what we start would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("tests", deadline=None)  # how long an example takes is the machine's load, and no property
settings.load_profile("tests")


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Has pytest-xdist give one worker all tests of a file, or of a session of ranks: they share what they start."""
    for item in items:
        item.add_marker(pytest.mark.xdist_group(_group(item)))


def _group(item: pytest.Item) -> str:
    name = "/".join(item.path.with_suffix("").parts[-2:])
    if "sessions" in item.fixturenames:
        parameters = item.callspec.params
        name += f"-{parameters.get('way', '')}-{parameters['size']}"
    return name


@pytest.fixture(autouse=True)
def keeps_the_exit_code_of_pytest():
    """A default daemon that fails has its process exit with 1 at the end, here pytest's, whatever the tests said."""
    yield
    if (api := sys.modules.get("coordd.api")) is not None:
        status, api._exits._status = api._exits._status, 0
        assert status == 0, f"the job of this test has failed: pytest would exit with {status}"
