from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from coordd.launch.cli import main
from coordd.version import VERSION


def test_it_knows_its_version(capsys):
    assert main(["version"]) == 0
    assert capsys.readouterr().out == f"coordd {VERSION}\n"
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"coordd {VERSION}\n"


def test_it_can_be_run_as_a_module():
    found = subprocess.run([sys.executable, "-m", "coordd", "version"], capture_output=True, text=True, check=True)
    assert found.stdout == f"coordd {VERSION}\n"


def test_the_drop_in_path_can_be_put_on_a_path(capsys):
    assert main(["drop-in-path"]) == 0
    assert Path(capsys.readouterr().out.removesuffix("\n"), "horovod", "torch", "__init__.py").is_file()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--help"], ["run", "status", "doctor", "version"]),
        (["run", "--help"], ["--fusion-mb", "--hosts", "coordd run -n 4 python train.py", "exit code"]),
        (["status", "--help"], ["PID|JOB", "--json", "--watch"]),
        (["doctor", "--help"], ["--json"]),
    ],
)
def test_help_helps(capsys, arguments, told):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    assert all(word in shown for word in told)


@pytest.mark.parametrize(
    ("arguments", "status", "told"),
    [
        (["run", "python"], 2, "coordd: how many ranks? say -n"),
        (["run", "-n", "1"], 2, "coordd: nothing to run"),
        (["run", "-n", "1", "--cycle-ms", "soon", "x"], 2, "coordd: --cycle-ms='soon' is not usable"),
        (["run", "-n", "1", "--fusion-mb", "-3", "x"], 2, "coordd: --fusion-mb=-3.0 is not usable: give a number"),
        (["run", "-n", "1", "--log-level", "loud", "x"], 2, "coordd: --log-level='loud' is not usable: give one of"),
        (["run", "-n", "2", "--launcher", "/no/mpirun", "x"], 1, "coordd: there is no program '/no/mpirun'"),
        (["run", "-n", "1", "--output-dir", "/dev/null/logs", "x"], 1, "coordd: "),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(capsys, arguments, status, told):
    assert main(arguments) == status
    shown = capsys.readouterr().err
    assert shown.startswith(told)
    assert shown.count("\n") == 1


@pytest.mark.parametrize("arguments", [[], ["fly"], ["run", "--no-such", "x"]])
def test_what_is_not_understood_is_a_usage_error(capsys, arguments):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert "usage: coordd" in capsys.readouterr().err


def test_a_flag_that_does_not_exist_comes_with_what_was_meant(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["run", "--fuson-mb", "8", "-n", "2", "python", "x.py"])
    assert stop.value.code == 2
    shown = capsys.readouterr().err
    assert "usage: coordd run -n N" in shown
    assert "there is no --fuson-mb; did you mean --fusion-mb?" in shown


def test_a_command_that_does_not_exist_comes_with_what_was_meant(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["rum", "-n", "2", "python", "x.py"])
    assert stop.value.code == 2
    assert "there is no rum; did you mean run?" in capsys.readouterr().err


def test_ctrl_c_ends_a_command_without_a_traceback(monkeypatch):
    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr("coordd.launch.status.status", interrupt)
    assert main(["status"]) == 130
