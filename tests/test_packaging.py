"""What a stranger gets from an installation: imports, entry points, types, and the same versions as we have."""

from __future__ import annotations

import pkgutil
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import EntryPoint, PackageNotFoundError, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from coordd.version import VERSION

REPOSITORY = Path(__file__).parent.parent
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text("utf-8"))
INFO = f"coordd-{VERSION}.dist-info"
PACKAGES = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
FACADES = {"coordd.keras", "coordd.tensorflow", "coordd.torch"}
FRAMEWORKS = ("torch", "tensorflow", "keras", "jax")


def modules(package: str) -> list[str]:
    folder = REPOSITORY / package
    return [name.name for name in pkgutil.walk_packages([str(folder)], f"{folder.name}.")]


def python(source: str) -> str:
    """Runs a program in an interpreter of its own, warnings being errors; returns what it printed."""
    path = [str(REPOSITORY / folder) for folder in (".", "plugins", "tools")]
    program = f"import sys; sys.path[:0] = {path!r}\n{source}"
    command = [sys.executable, "-W", "error", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout


def loaded(*names: str) -> set[str]:
    """Lists the top-level modules that are there after importing the named ones."""
    return set(python(f"import {', '.join(names)}; print(*{{name.partition('.')[0] for name in sys.modules}})").split())


# Imports


def test_importing_coordd_loads_neither_a_framework_nor_mpi():
    assert loaded("coordd").isdisjoint({*FRAMEWORKS, "mpi4py"})


@pytest.mark.parametrize("name", ["keras", "tensorflow"])
def test_a_facade_without_its_framework_says_what_to_install(name):
    script = f"import sys; sys.modules[{name!r}] = None; import coordd.{name}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    wanted = f"coordd.{name} needs .*, and {name} is not installed: pip install 'coordd.tensorflow.'"
    assert re.search(wanted, done.stderr.splitlines()[-1]), done.stderr


def test_every_module_but_the_facades_can_be_imported_without_a_framework():
    names = [name for name in modules("coordd") if name not in FACADES and not name.endswith(".__main__")]
    assert "coordd.config" in names
    assert loaded(*names).isdisjoint(FRAMEWORKS)


def test_no_module_starts_mpi_when_it_is_imported():
    names = [name for name in modules("coordd") if name not in FACADES and not name.endswith(".__main__")]
    asked = "print('mpi4py.MPI' in sys.modules and sys.modules['mpi4py.MPI'].Is_initialized())"
    assert python(f"import {', '.join(names)}\n{asked}") == "False\n"


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_exists(package):
    names = [name for name in [Path(package).name, *modules(package)] if not name.endswith("__main__")]
    python("\n".join(f"from {name} import *" for name in names))


def test_no_package_shadows_another_distribution():
    for package in PACKAGES:
        assert Path(package).name not in FRAMEWORKS


# Entry points


GROUPS = {**PROJECT["project"]["entry-points"], "console_scripts": PROJECT["project"]["scripts"]}
ENTRY_POINTS = [EntryPoint(name, value, group) for group, found in GROUPS.items() for name, value in found.items()]


@pytest.mark.parametrize("entry_point", ENTRY_POINTS, ids=lambda entry_point: f"{entry_point.group}-{entry_point.name}")
def test_an_entry_point_leads_somewhere(entry_point):
    assert entry_point.load()


# The wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> dict[str, str]:
    """Builds the wheel without the network; returns its files' names and texts."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    with zipfile.ZipFile(built) as archive:
        return {name: archive.read(name).decode("utf-8") for name in archive.namelist()}


def test_the_wheel_holds_the_packages_and_nothing_else(wheel):
    assert {name.partition("/")[0] for name in wheel} == {INFO, *(Path(package).name for package in PACKAGES)}


@pytest.mark.parametrize("package", PACKAGES)
def test_the_wheel_holds_every_module_and_the_mark_of_types(wheel, package):
    folder = REPOSITORY / package
    wanted = {path.relative_to(folder.parent).as_posix() for path in folder.rglob("*.py")}
    assert wanted | {f"{folder.name}/py.typed"} <= set(wheel)


def test_the_wheel_says_what_it_is(wheel):
    assert "License-Expression: Apache-2.0" in wheel[f"{INFO}/METADATA"]
    assert "Requires-Python: >=3.11" in wheel[f"{INFO}/METADATA"]
    assert wheel[f"{INFO}/licenses/LICENSE"] == (REPOSITORY / "LICENSE").read_text("utf-8")
    assert "coordd = coordd.launch.cli:main" in wheel[f"{INFO}/entry_points.txt"]


# The constraints


PINS = [line for line in (REPOSITORY / "constraints.txt").read_text("utf-8").splitlines() if not line.startswith("#")]
CUDA = re.compile(r"nvidia-|cuda-|triton")


def needed() -> set[str]:
    """Follows the requirements of every extra through what is installed here."""
    extras = PROJECT["project"]["optional-dependencies"].values()
    waiting = [*PROJECT["project"]["dependencies"], *(text for extra in extras for text in extra)]
    found: set[str] = set()
    while waiting:
        requirement = Requirement(waiting.pop())
        name = canonicalize_name(requirement.name)
        if name in found or not (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
            continue
        found.add(name)
        try:
            waiting += requires(name) or []
        except PackageNotFoundError:  # an extra that is not installed here
            continue
    return found


@pytest.mark.parametrize("line", PINS)
def test_a_pin_is_one_exact_release_from_anywhere(line):
    assert re.fullmatch(r"[A-Za-z0-9_.-]+==[0-9][0-9.]*(post[0-9]+)?", line)


def test_pins_are_sorted_and_unique():
    names = [canonicalize_name(line.partition("==")[0]) for line in PINS]
    assert names == sorted(set(names))


def test_everything_that_is_needed_is_pinned():
    pinned = {canonicalize_name(line.partition("==")[0]) for line in PINS}
    assert {name for name in needed() - pinned if not CUDA.match(name)} == set()


def test_nothing_is_pinned_that_is_not_needed():
    pinned = {canonicalize_name(line.partition("==")[0]) for line in PINS}
    assert pinned - needed() == set()


# The Makefile


needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


@needs_make
@pytest.mark.parametrize(("target", "installs"), [("demo", 1), ("test", 2), ("check", 2)])
def test_the_demo_installs_what_it_needs_and_developers_the_rest_on_top(tmp_path, target, installs):
    command = ["make", "-n", target, f"PYTHON={sys.executable}", f"VENV={tmp_path / 'venv'}"]
    told = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    extras = re.findall(r'pip install .* -c constraints\.txt -e "\.\[(.*)\]"', told)
    assert (
        extras
        == ["mpi,torch,pipeline,examples", "mpi,torch,tensorflow-cpu,pipeline,tune,picture,examples,dev"][:installs]
    )


@needs_make
def test_make_says_which_python_it_needs(tmp_path):
    old = tmp_path / "python3.10"
    old.write_text("#!/bin/sh\nexit 1\n", "utf-8")
    old.chmod(0o755)
    command = ["make", "demo", f"PYTHON={old}", f"VENV={tmp_path / 'venv'}"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert f"coordd needs Python 3.11 or newer, and '{old}' is not." in done.stderr
    assert "make demo PYTHON=python3.11" in done.stderr
    assert not (tmp_path / "venv").exists()
