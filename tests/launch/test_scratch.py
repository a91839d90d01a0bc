from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

import pytest

from coordd.launch import scratch as module
from coordd.launch.scratch import scratch

SESSION, SEGMENTS = "PRTE_MCA_prte_tmpdir_base", "OMPI_MCA_btl_sm_backing_directory"


@pytest.fixture
def bases(tmp_path, monkeypatch):
    """Where folders are made: for sessions, and for memory."""
    found = tmp_path / "sessions", tmp_path / "memory"
    for each in found:
        each.mkdir()
    monkeypatch.setattr(module, "_MEMORY", found[1])
    monkeypatch.setenv("TMPDIR", str(found[0]))
    return found


def test_a_job_has_folders_of_its_own_and_nothing_stays(bases):
    with scratch(os.environ) as variables, scratch(os.environ) as others:
        for name, base in zip((SESSION, SEGMENTS), bases, strict=True):
            folder = Path(variables[name])
            assert folder.parent == base
            assert folder.stat().st_mode & 0o777 == 0o700
            assert variables[name] != others[name]
            (folder / "session" / "0").mkdir(parents=True)
    assert [list(base.iterdir()) for base in bases] == [[], []]


def test_what_the_user_has_chosen_stays(bases):
    with scratch({**os.environ, SESSION: "/mine"}) as variables:
        assert SESSION not in variables
        assert SEGMENTS in variables
        assert not list(bases[0].iterdir())


def test_where_there_can_be_no_folder_open_mpi_chooses(bases):
    bases[1].rmdir()
    with scratch(os.environ) as variables:
        assert SEGMENTS not in variables
        assert SESSION in variables


def test_what_a_launcher_has_not_removed_to_the_end_is_left_to_the_next_one(bases, monkeypatch):
    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt), scratch(os.environ) as variables:
        (Path(variables[SESSION]) / "ompi.7").mkdir()
        (Path(variables[SEGMENTS]) / "sm_segment.a").touch()
        patch.setattr(module.shutil, "rmtree", _interrupted)
    assert list(bases[0].iterdir())
    with scratch(os.environ):
        pass
    assert [list(base.iterdir()) for base in bases] == [[], []]


def _interrupted(*_, **__):
    raise KeyboardInterrupt


def test_folders_of_killed_launchers_are_removed_and_no_others(bases):
    for name in ("coordd-run-dead", "coordd-run-alive", "coordd-run-beginning", "ompi.7"):
        (bases[0] / name).mkdir()
    (bases[0] / "coordd-run-dead" / "lock").touch()
    with (bases[0] / "coordd-run-alive" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with scratch(os.environ):
            found = {each.name for each in bases[0].iterdir()}
            assert found > {"coordd-run-alive", "coordd-run-beginning", "ompi.7"}
            assert len(found) == 4
