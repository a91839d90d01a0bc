"""The output of ``horovodrun --check-build`` for coordd; job scripts and users look for its check boxes."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, entry_points, version

from coordd.launch.launcher import Launcher, LauncherError
from coordd.version import VERSION

__all__ = ["build", "installed"]

_FRAMEWORKS = {"TensorFlow": ("tensorflow", "tensorflow-cpu"), "PyTorch": ("torch",), "MXNet": ("mxnet",)}
_TO_LOOK_CLOSER = "Nothing was built for this, and nothing has been tried: 'coordd doctor' does that.\n"


def build() -> str:
    """Returns the list of frameworks, controllers and operations, with an X for each that coordd can use."""
    plugins = {entry.name for entry in entry_points(group="coordd.plugins")}
    mpi = _mpi()
    frameworks = {title: names[0] in plugins and bool(installed(*names)) for title, names in _FRAMEWORKS.items()}
    controllers = {"MPI": mpi, "Gloo": False}
    operations = {"NCCL": False, "DDL": False, "CCL": False, "MPI": mpi, "Gloo": False, "common memory of a host": True}
    parts = {"Frameworks": frameworks, "Controllers": controllers, "Tensor Operations": operations}
    lists = "\n".join(f"Available {what}:\n{_boxes(found.items())}" for what, found in parts.items())
    return f"coordd v{VERSION}, in the place of Horovod:\n\n{lists}\n{_TO_LOOK_CLOSER}"


def installed(*names: str) -> str | None:
    """Returns the version of the first of these distributions that is installed, without importing it, or None."""
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def _mpi() -> bool:
    try:
        return bool(installed("mpi4py") and Launcher.find())
    except LauncherError:
        return False


def _boxes(found: Iterable[tuple[str, bool]]) -> str:
    return "".join(f"    [{'X' if there else ' '}] {what}\n" for what, there in found)
