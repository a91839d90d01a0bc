from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordd.errors import ConfigError
from coordd.tuning.settings import Settings, Space
from tests.synthetic import START

MIB = 1 << 20
ONE = Space(fusion_mb=(32.0,), cycle_ms=(20.0,), buckets=(1,), algorithm=("slices",), compression=("none",))


def other(**changes) -> Settings:
    return msgspec.structs.replace(START, **changes)


@given(st.integers(0, 1 << 30), st.sampled_from([1, 2, 3, 16]), st.sampled_from([1.0, 8.0, 128.0]))
def test_there_are_as_many_buckets_as_asked_for_and_none_is_too_large(gradients, buckets, fusion_mb):
    size = other(buckets=buckets, fusion_mb=fusion_mb).bucket_bytes(gradients)
    assert 1 <= size <= fusion_mb * MIB
    assert size * buckets >= min(gradients, size * buckets)
    assert size == fusion_mb * MIB or (size - 1) * buckets < max(1, gradients) <= size * buckets


def test_no_fusion_stays_no_fusion():
    assert other(fusion_mb=0.0, buckets=4).bucket_bytes(MIB) == 0


def test_the_usual_space_holds_the_start_in_its_place():
    space = Space.around(other(fusion_mb=24.0, cycle_ms=3.5), algorithms=["slices", "ring"])
    assert other(fusion_mb=24.0, cycle_ms=3.5, algorithm="ring") in space
    assert list(space.fusion_mb) == sorted(space.fusion_mb)
    assert list(space.cycle_ms) == sorted(space.cycle_ms)


def test_numbers_are_changed_only_with_leave():
    assert Space.around(START).compression == ("none",)
    assert "compression" not in Space.around(START).tuned
    assert Space.around(START, compressions=["bf16"]).compression == ("none", "bf16")


def test_what_is_not_a_choice_is_not_in_the_space():
    assert START in ONE
    for change in ({"fusion_mb": 33.0}, {"cycle_ms": 1.0}, {"buckets": 2}, {"algorithm": "x"}, {"compression": "x"}):
        assert other(**change) not in ONE


def test_a_space_knows_its_size():
    assert (ONE.size, ONE.tuned) == (1, ())
    larger = msgspec.structs.replace(ONE, buckets=(1, 2, 4), compression=("none", "bf16"))
    assert (larger.size, larger.tuned) == (6, ("buckets", "compression"))


@pytest.mark.parametrize("choices", [(), (1, 1)])
def test_a_knob_without_a_choice_or_with_one_twice_is_refused(choices):
    with pytest.raises(ConfigError, match="buckets="):
        msgspec.structs.replace(ONE, buckets=choices).__post_init__()
