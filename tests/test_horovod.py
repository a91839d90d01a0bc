"""Each of Horovod's variables is read, explained, or nobody's business of ours; none is passed over in silence."""

from __future__ import annotations

import pytest

from coordd.config import knobs, unread
from coordd.horovod import MEANINGLESS

ALIASES = {knob.alias.removeprefix("HOROVOD_") for knob in knobs() if knob.alias}


def test_no_variable_is_both_read_and_explained_away():
    assert ALIASES.isdisjoint(MEANINGLESS)


@pytest.mark.parametrize("name", MEANINGLESS)
def test_a_variable_without_a_meaning_is_told_with_the_reason(name):
    assert unread({f"HOROVOD_{name}": "1"}) == (f"HOROVOD_{name} has no effect: {MEANINGLESS[name]}",)
    assert "\n" not in MEANINGLESS[name]


@pytest.mark.parametrize("name", sorted(ALIASES))
def test_a_variable_that_is_read_is_not_told(name):
    assert unread({f"HOROVOD_{name}": "1"}) == ()


@pytest.mark.parametrize(
    "name", ["RANK", "LOCAL_SIZE", "HOSTNAME", "WITH_PYTORCH", "WITHOUT_GLOO", "GPU_OPERATIONS", "CUDA_HOME"]
)
def test_what_launchers_and_images_set_is_not_told(name):
    assert unread({f"HOROVOD_{name}": "1"}) == ()


def test_a_misspelt_variable_is_told_with_what_was_meant():
    told = "HOROVOD_FUSION_TRESHOLD is not read by coordd and has no effect; did you mean HOROVOD_FUSION_THRESHOLD?"
    assert unread({"HOROVOD_FUSION_TRESHOLD": "1"}) == (told,)
    assert unread({"HOROVOD_QQQ": "1"})[0].endswith("docs/knobs.md lists those that are read")


def test_several_are_told_in_order_after_our_own():
    told = unread({"HOROVOD_ELASTIC": "1", "HOROVOD_CONTROLLER": "mpi", "COORDD_X": "1"})
    assert [sentence.split()[0] for sentence in told] == ["COORDD_X", "HOROVOD_CONTROLLER", "HOROVOD_ELASTIC"]
