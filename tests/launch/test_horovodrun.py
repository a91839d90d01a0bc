"""Every flag of `horovodrun` is understood, or refused by a sentence that says what to use."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import pytest

from coordd.config import Config, knobs
from coordd.errors import ConfigError
from coordd.launch import horovodrun
from coordd.launch.horovodrun import FLAGS, asks_for_build, notes, ssh_words, variables
from coordd.launch.options import knob_variables
from tests.launch.test_options import parsed

# What `horovodrun --help` lists, with a value where one follows.
HOROVODRUN = """
-np 2 / --num-proc 2 / -H a:2,b:2 / --hosts a:2 / --hostfile f / -hostfile f / -p 22 / --ssh-port 22 / -i key /
--ssh-identity-file key / --output-filename logs / --verbose / --config-file c.yaml / --check-build / -cb / -v /
--version / --disable-cache / --mpi-args=--x / --tcp / --binding-args x / --prefix-timestamp / -prefix-timestamp /
--network-interface eth0 / --network-interfaces eth0 / --start-timeout 9 / --gloo / --mpi / --jsrun /
--fusion-threshold-mb 32 / --cycle-time-ms 1 / --cache-capacity 9 / --hierarchical-allreduce /
--no-hierarchical-allreduce / --hierarchical-allgather / --no-hierarchical-allgather / --torus-allreduce /
--no-torus-allreduce / --autotune / --no-autotune / --autotune-log-file f / --autotune-warmup-samples 3 /
--autotune-steps-per-sample 9 / --autotune-bayes-opt-max-samples 9 / --autotune-gaussian-process-noise 0.8 /
--timeline-filename f / --timeline-mark-cycles / --no-timeline-mark-cycles / --stall-check / --no-stall-check /
--stall-check-warning-time-seconds 9 / --stall-check-shutdown-time-seconds 9 / --mpi-threads-disable /
--no-mpi-threads-disable / --num-nccl-streams 1 / --thread-affinity 1,2 / --gloo-timeout-seconds 9 /
--log-level TRACE / --log-level fatal / --log-with-timestamp / --log-without-timestamp / --min-np 1 / --max-np 2 /
--slots-per-host 1 / --host-discovery-script x / --elastic-timeout 9 / --reset-limit 1 / --blacklist-cooldown-range 1 2
""".replace("\n", " ").split(" / ")


@pytest.mark.parametrize("line", [line.strip() for line in HOROVODRUN])
def test_a_flag_is_understood_or_refused_with_advice(line):
    options = parsed(f"--as-horovod {line} x")
    assert options.command == ["x"]
    knob_variables(options)
    if any(flag.why for _, flag, _ in options.horovodrun):
        with pytest.raises(ConfigError, match=f"^{line.split()[0]} is a flag of horovodrun that coordd refuses: "):
            variables(options)
    else:
        Config.load(variables(options))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--fusion-threshold-mb 0.5", {"HOROVOD_FUSION_THRESHOLD": "524288"}),
        ("--fusion-threshold-mb 0 --cycle-time-ms 2.5", {"HOROVOD_FUSION_THRESHOLD": "0", "HOROVOD_CYCLE_TIME": "2.5"}),
        ("--torus-allreduce", {"HOROVOD_TORUS_ALLREDUCE": "1"}),
        ("--no-torus-allreduce", {"HOROVOD_TORUS_ALLREDUCE": "0"}),
        ("--torus-allreduce --no-torus-allreduce", {"HOROVOD_TORUS_ALLREDUCE": "0"}),
        ("--verbose", {"HOROVOD_LOG_LEVEL": "info"}),
        ("--network-interfaces eth0", {"HOROVOD_GLOO_IFACE": "eth0"}),
        ("--mpi --disable-cache", {}),
    ],
)
def test_a_flag_sets_the_variable_that_horovodrun_sets(line, expected):
    assert variables(parsed(f"--as-horovod {line} x")) == expected


def test_a_flag_sets_a_path_of_ours():
    options = parsed("--as-horovod --output-filename logs -hostfile hosts x")
    assert (options.output_dir, options.hostfile) == (Path("logs"), Path("hosts"))


def test_a_value_that_is_no_number_is_refused():
    with pytest.raises(ConfigError, match="--fusion-threshold-mb='many' is not usable: give a number"):
        variables(parsed("--as-horovod --fusion-threshold-mb many x"))


def test_flags_that_choose_a_transport_are_left_aside_with_a_note():
    options = parsed("--as-horovod --gloo --mpi --disable-cache x")
    assert variables(options) == {}
    own = "coordd chooses the transport itself; --transport names one"
    assert notes(options) == (f"--gloo: {own}", f"--mpi: {own}")


def test_flags_for_ssh_are_given_in_its_words():
    assert ssh_words(parsed("--as-horovod --ssh-port 2222 -i key x")) == ["-p", "2222", "-i", "key"]
    assert ssh_words(parsed("--as-horovod x")) == []


@pytest.mark.parametrize("port", ["0", "65536", "many", "-1", "2.5"])
def test_a_port_that_is_none_is_refused(port):
    with pytest.raises(ConfigError, match=f"--ssh-port='{port}' is not usable: give a port, from 1 to 65535"):
        ssh_words(parsed(f"--as-horovod --ssh-port={port} x"))


@pytest.mark.parametrize(("line", "asks"), [("--check-build", True), ("-cb", True), ("--mpi", False), ("", False)])
def test_what_could_be_run_may_be_asked(line, asks):
    assert asks_for_build(parsed(f"--as-horovod {line}")) is asks


@pytest.mark.parametrize("line", ["--cycle-time-ms 1", "--gloo", "-p 22", "--mpi"])
def test_without_as_horovod_horovodruns_flags_are_none(line):
    with pytest.raises(ConfigError, match=f"{line.split()[0]} is a flag of horovodrun: give --as-horovod too"):
        variables(parsed(f"{line} x"))


def test_a_knob_that_has_the_same_flag_keeps_it(monkeypatch):
    knob = dataclasses.replace(knobs()[0], name="timeline_mark_cycles", kind=bool)
    monkeypatch.setattr(horovodrun, "knobs", lambda: (knob,))
    parser = argparse.ArgumentParser()
    parser.add_argument(knob.flag, action="store_true")
    horovodrun.add_flags(parser)
    assert parser.parse_args([knob.flag, "--cycle-time-ms", "1"]).timeline_mark_cycles


def test_flags_of_the_users_command_are_left_alone():
    options = parsed("--as-horovod -np 2 train.py --gloo -v --verbose")
    assert variables(options) == {}
    assert options.command == ["train.py", "--gloo", "-v", "--verbose"]


def test_every_refusal_is_one_line():
    assert all(flag.why.count("\n") == 0 for flag in FLAGS)
    assert {sum(map(bool, (flag.variable, flag.option, flag.ssh, flag.note, flag.why))) for flag in FLAGS} == {0, 1}
