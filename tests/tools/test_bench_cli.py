import pytest

from coordd_tools.bench import catalogue
from coordd_tools.bench.cli import main
from coordd_tools.bench.worker import engines, staged


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["step", "--models", "gpt,bert"], "unknown: bert; choose of gpt, mlp, small"),
        (["step", "--engines", "mpi"], "unknown: mpi; choose of none, coordd, ddp"),
        (["step", "-n", "0"], "'0' is not a whole number of at least 1"),
        (["allreduce", "--sizes", "4,5"], "'4,5' is not a list of multiples of 4 bytes"),
        (["allreduce", "--sizes", "4,K"], "'4,K' is not a list of multiples of 4 bytes"),
        (["idle", "--json", "no-such-folder/idle.json"], "'no-such-folder' is not a folder"),
        (["sets", "-n", "3"], "'3' is not a whole number of at least 4"),
        (["pipeline", "-n", "1"], "'1' is not a whole number of at least 2"),
        (["pipeline", "--engines", "gpipe,coordd"], "unknown: coordd; choose of none, gpipe, 1f1b"),
        ([], "required"),
    ],
)
def test_bad_arguments_are_told_what_would_be_right(arguments, said, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert said in " ".join(capsys.readouterr().err.split())


def test_an_engine_that_is_not_installed_is_named_before_anything_starts(monkeypatch, capsys):
    monkeypatch.setitem(catalogue._NEEDS, "coordd", ("no_such_package.torch",))
    assert main(["step", "--engines", "coordd"]) == 2
    assert "no_such_package.torch" in " ".join(capsys.readouterr().err.split())


def test_horovod_joins_where_it_is_installed(monkeypatch):
    monkeypatch.setitem(catalogue._NEEDS, "horovod", ("no_such_package",))
    assert catalogue.defaults("step") == ("none", "coordd", "ddp")
    monkeypatch.setitem(catalogue._NEEDS, "horovod", ("json",))
    assert catalogue.defaults("step") == ("none", "coordd", "ddp", "horovod")


@pytest.mark.parametrize(
    ("noun", "known"),
    [("step", engines.TRAINERS), ("allreduce", engines.REDUCERS), ("pipeline", staged.PIPELINES)],
)
def test_every_engine_of_the_catalogue_can_be_made_and_knows_its_name(noun, known):
    for name in catalogue.ENGINES[noun]:
        assert known[name]().name == name


@pytest.mark.parametrize("noun", ["idle", "startup"])
def test_the_engines_of_idle_and_startup_are_known(noun):
    assert set(catalogue.ENGINES[noun]) <= set(engines.REDUCERS)
