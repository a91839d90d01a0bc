"""`coordd tune` as a user sees it. The scripts that it starts tell made-up step times to a search of their own."""

from __future__ import annotations

import sys

import pytest

from coordd.launch import cli
from coordd.tuning.record import Record
from tests.tuning.found import RECORD

pytest.importorskip("optuna")

SCRIPT = """
import os
from coordd.config import Config
from coordd.tuning.settings import Settings, Space
from coordd.tuning.key import Key
from coordd.tuning.record import path_for
from coordd.tuning.session import Session

config = Config.load(os.environ)
assert config.autotune
start = Settings(fusion_mb=32.0, cycle_ms=20.0, buckets=1, algorithm="slices", compression="none")
key = Key(model="m", world="1", host="h")
path = path_for(key, config.autotune_log, os.environ)
session = Session(Space.around(start), start, key, path=path, share=config.autotune_share, limit=config.autotune_steps)
for _ in range(1500):
    session.tell(0.02 - 0.001 * session.settings.buckets)
session.close()
raise SystemExit(int(os.environ.get("ENDS_WITH", "0")))
"""


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "coordd" / "tune"


def tune(*options):
    return cli.main(["tune", *map(str, options), "--no-bind", "-n", "1", sys.executable, "-c", SCRIPT])


def test_a_search_is_run_and_shown(cache, capfd):
    assert tune() == 0
    out = capfd.readouterr().out
    (path,) = cache.glob("*.json")
    assert Record.load(path).progress.best.buckets == 16
    assert " % less time a step: " in out
    assert "buckets=16" in out
    assert path.with_suffix(".html").as_uri() in out
    assert "<svg" in path.with_suffix(".html").read_text("utf-8")


def test_it_is_kept_where_the_user_says(cache, tmp_path, capfd):
    assert tune("--autotune-log", tmp_path / "mine.json", "--html", tmp_path / "p.html") == 0
    assert Record.load(tmp_path / "mine.json").progress.done
    assert (tmp_path / "p.html").exists()
    assert not cache.exists()


def test_steps_end_the_search_and_not_the_run(cache):
    assert tune("--steps", 100) == 0
    (path,) = cache.glob("*.json")
    progress = Record.load(path).progress
    assert progress.steps == 1500
    assert 0 < progress.spent < 100
    assert not progress.done


def test_a_job_that_fails_gives_its_code_and_shows_what_there_is(cache, capfd, monkeypatch):
    monkeypatch.setenv("ENDS_WITH", "7")
    assert tune() == 7
    assert "the picture: file://" in capfd.readouterr().out


def test_a_run_that_recorded_nothing_says_so(cache, capfd):
    RECORD.save(cache / "earlier.json")
    assert cli.main(["tune", "-n", "1", sys.executable, "-c", ""]) == 1
    assert "wrote no autotune record: it has to train with a DistributedOptimizer" in capfd.readouterr().err


def test_a_dry_run_only_tells_the_command(cache, capfd):
    assert tune("--dry-run") == 0
    out = capfd.readouterr().out
    assert out.startswith("COORDD_AUTOTUNE=1 COORDD_AUTOTUNE_SHARE=1 ")
    assert len(out.splitlines()) == len(SCRIPT.splitlines()) + 1


def test_the_last_search_can_be_shown_again(cache, capfd):
    RECORD.save(cache / "one.json")
    assert cli.main(["tune", "--show"]) == 0
    assert (cache / "one.html").exists()
    assert "buckets=2" in capfd.readouterr().out


def test_a_record_can_be_shown(tmp_path, capfd):
    RECORD.save(tmp_path / "one.json")
    assert cli.main(["tune", "--show", str(tmp_path / "one.json")]) == 0
    assert (tmp_path / "one.html").exists()


def test_nothing_to_show_is_told_with_what_to_do(cache, capfd):
    assert cli.main(["tune", "--show"]) == 2
    assert f"no search is recorded in {cache}: run 'coordd tune" in capfd.readouterr().err


@pytest.mark.parametrize("text", [None, "{}"])
def test_a_record_that_cannot_be_shown_is_named(tmp_path, capfd, text):
    path = tmp_path / "one.json"
    if text:
        path.write_text(text, "utf-8")
    assert cli.main(["tune", "--show", str(path)]) == 1
    assert str(path) in capfd.readouterr().err
    assert not path.with_suffix(".html").exists()


def test_a_missing_optuna_is_told_before_anything_is_started(cache, capfd, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert tune() == 2
    assert "pip install 'coordd[tune]'" in capfd.readouterr().err
    assert not cache.exists()
