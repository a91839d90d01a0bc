from __future__ import annotations

import string

from hypothesis import given
from hypothesis import strategies as st

from coordd.host.world import World
from coordd.ops.messages import Kind, Request
from coordd.tuning.key import Key, fingerprint, shape

requests = st.builds(
    Request,
    st.sampled_from(Kind),
    st.text(string.ascii_letters, min_size=1, max_size=5),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    shape=st.lists(st.integers(1, 9), max_size=3).map(tuple),
)
W = Request(Kind.ALLREDUCE, "w", "float32", (2, 3))


@given(st.lists(requests, max_size=8).flatmap(lambda found: st.tuples(st.just(found), st.permutations(found))))
def test_order_and_repetition_do_not_matter(both):
    found, shuffled = both
    assert fingerprint(found) == fingerprint([*shuffled, *shuffled[:2]])


def test_everything_else_about_a_tensor_does():
    others = [
        Request(Kind.ALLREDUCE, "v", "float32", (2, 3)),
        Request(Kind.ALLREDUCE, "w", "float16", (2, 3)),
        Request(Kind.ALLREDUCE, "w", "float32", (3, 2)),
        Request(Kind.ALLGATHER, "w", "float32", (2, 3)),
    ]
    assert len({fingerprint([request]) for request in (W, *others)}) == 5


def test_what_is_used_once_says_nothing():
    assert fingerprint([W, Request(Kind.ALLREDUCE, "metric.17", transient=True)]) == fingerprint([W])


def test_a_fingerprint_stays_what_it_is():
    assert fingerprint([W]) == "d82119e27859dbaa"


def test_the_shape_of_a_world():
    assert shape(World(0, ("a",))) == "1"
    assert shape(World(0, ("a", "a", "b", "b", "b"))) == "2+3"
    assert shape(World(3, ("b", "a", "b"))) == "2+1"


def test_keys_have_names_of_their_own():
    keys = [Key(model=model, world=world, host="h") for model in "ab" for world in ("1", "2")]
    assert len({key.digest for key in keys}) == 4
    assert all(key.digest.isalnum() for key in keys)
