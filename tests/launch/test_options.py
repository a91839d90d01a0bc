from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from coordd.config import knobs
from coordd.errors import ConfigError
from coordd.launch.hosts import Host
from coordd.launch.options import add_options, command_of, extra_of, hosts_of, joined, knob_variables


def parsed(line: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_options(parser)
    return parser.parse_args(joined(line.split()))


@pytest.mark.parametrize("option", ["-n 4", "-np 4", "--num-proc 4", "-n4", "--num-proc=4"])
def test_the_number_of_ranks_has_the_names_that_fingers_know(option):
    assert parsed(f"{option} python").size == 4


@pytest.mark.parametrize(
    "option", ["-n 0", "-n -1", "-n x", "-n 1.5", "--threads 0", "--grace-seconds -1", "--fusion 1"]
)
def test_nonsense_is_refused(option, capsys):
    with pytest.raises(SystemExit) as stop:
        parsed(f"{option} python")
    assert stop.value.code == 2
    assert "error:" in capsys.readouterr().err


def test_options_end_where_the_command_begins():
    options = parsed("-n 2 train.py -n 3 --hosts x -- --fusion-mb 1")
    assert options.size == 2
    assert command_of(options) == ["train.py", "-n", "3", "--hosts", "x", "--", "--fusion-mb", "1"]
    assert options.hosts is None


def test_two_dashes_may_stand_before_the_command():
    assert command_of(parsed("-n 2 -- --odd")) == ["--odd"]


def test_a_command_is_needed():
    with pytest.raises(ConfigError, match="nothing to run"):
        command_of(parsed("-n 2"))


@pytest.mark.parametrize("knob", knobs(), ids=lambda knob: knob.name)
def test_every_knob_is_an_option_and_becomes_a_variable(knob):
    if knob.kind is bool:
        assert knob_variables(parsed(f"{knob.flag} x")) == {knob.variable: "1"}
        assert knob_variables(parsed(f"--no-{knob.flag[2:]} x")) == {knob.variable: "0"}
        return
    value = knob.choices[0] if knob.choices else {int: "16", float: "0.5", str: "mpi"}[knob.kind]
    assert knob_variables(parsed(f"{knob.flag} {value} x")) == {knob.variable: value}


def test_knobs_that_were_not_given_are_left_to_the_environment():
    assert knob_variables(parsed("-n 2 python")) == {}


def test_an_illegal_knob_is_told_before_anything_starts():
    with pytest.raises(ConfigError, match="--fusion-mb='many' is not usable: give a number"):
        knob_variables(parsed("--fusion-mb many python"))


def test_hosts_come_from_the_line_or_from_a_file(tmp_path):
    path = Path(tmp_path, "hostfile")
    path.write_text("a slots=4\nb:2\n", "utf-8")
    assert hosts_of(parsed("-H a:4,b:2 x")) == hosts_of(parsed(f"--hostfile {path} x")) == (Host("a", 4), Host("b", 2))
    assert hosts_of(parsed("-n 2 x")) == ()


def test_arguments_for_the_launcher_are_split_as_in_a_shell():
    options = parsed("x")
    options.mpi_args = "--mca btl 'self, tcp'"
    assert extra_of(options) == ("--mca", "btl", "self, tcp")
    options.mpi_args = "'"
    with pytest.raises(ConfigError, match="--mpi-args"):
        extra_of(options)


def test_arguments_for_the_launcher_may_look_like_options():
    assert extra_of(parsed("--mpi-args --mpi=pmix -n 2 x")) == ("--mpi=pmix",)
    assert parsed("--mpi-args --mpi=pmix -n 2 x").size == 2
    assert joined(["x", "--mpi-args"]) == ["x", "--mpi-args"]
