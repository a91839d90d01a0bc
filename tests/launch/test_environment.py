from __future__ import annotations

import pytest

from coordd.errors import ConfigError
from coordd.launch.environment import assignments, forwarded

HERE = {
    "PATH": "/bin",
    "PYTHONPATH": "/src",
    "OMP_NUM_THREADS": "2",
    "COORDD_FUSION_MB": "8",
    "COORDD_LAUNCHED": "1",
    "TF_NUM_INTRAOP_THREADS": "2",
    "TF_TOKEN_app_terraform_io": "secret",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "GITHUB_TOKEN": "secret",
    "HOME": "/home/me",
}


def test_only_what_training_needs_goes_to_other_hosts():
    assert forwarded(HERE) == ("COORDD_FUSION_MB", "OMP_NUM_THREADS", "PATH", "PYTHONPATH", "TF_NUM_INTRAOP_THREADS")


def test_the_user_may_add_to_it():
    assert "GITHUB_TOKEN" in forwarded(HERE, ["GITHUB_TOKEN"])


def test_a_variable_is_taken_or_set():
    assert assignments(["HOME", "NEW=a=b", "EMPTY="], HERE) == {"HOME": "/home/me", "NEW": "a=b", "EMPTY": ""}


@pytest.mark.parametrize("word", ["", "=1", "A B", "1A=2", "-x", "NOT_SET", "A;B=1"])
def test_what_is_no_variable_is_refused(word):
    with pytest.raises(ConfigError, match=r"^--env="):
        assignments([word], HERE)
