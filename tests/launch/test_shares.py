from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from coordd.errors import ConfigError
from coordd.host.cores import Cores
from coordd.launch.shares import Share, Wish, describe, divide, thread_variables


def flat(count, **rest):
    return Cores(tuple((core,) for core in range(count)), **rest)


EIGHT = flat(8)
HYPER = Cores(tuple((core, core + 8) for core in range(8)))
CORES = st.builds(
    Cores,
    st.integers(1, 64).map(lambda count: tuple((core, core + 64) for core in range(count))),
    st.none() | st.integers(1, 64),
    st.booleans(),
)
SIZES = st.integers(1, 80)
WISHES = st.builds(Wish, st.integers(0, 8), st.frozensets(st.integers(0, 127), max_size=4))


def shares_of(cores, size, wish):
    return [divide(cores, rank, size, wish) for rank in range(size)]


@pytest.mark.parametrize(
    ("cores", "place", "threads", "share"),
    [
        (flat(4), (0, 1), 0, Share(4)),
        (flat(4), (0, 2), 0, Share(2, (0, 1))),
        (flat(4), (1, 2), 0, Share(2, (2, 3))),
        (flat(4), (3, 4), 0, Share(1, (3,))),
        (flat(4), (1, 2), 3, Share(3, (2, 3))),
        (flat(2), (1, 2), 2, Share(2)),
        (flat(4), (5, 8), 0, Share(1)),
        (HYPER, (1, 4), 0, Share(2, (2, 3, 10, 11))),
        (Cores(HYPER.threads, quota=4), (0, 2), 0, Share(2)),
        (Cores(HYPER.threads, quota=4), (0, 2), 1, Share(1)),
        (flat(8, binds=False), (0, 2), 3, Share(3)),
        (EIGHT, (0, 2), 3, Share(3, (0, 1, 2), (3,))),
        (EIGHT, (1, 2), 3, Share(3, (4, 5, 6), (7,))),
        (EIGHT, (1, 2), 1, Share(1, (4, 5, 6), (7,))),
        (EIGHT, (0, 2), 6, Share(6, (0, 1, 2, 3))),
        (EIGHT, (0, 1), 6, Share(6, tuple(range(7)), (7,))),
        (flat(7), (0, 2), 0, Share(3, (0, 1, 2), (6,))),
        (flat(7), (1, 2), 0, Share(3, (3, 4, 5), (6,))),
        (flat(9), (0, 8), 0, Share(1, (0,))),
        (HYPER, (1, 2), 3, Share(3, (4, 5, 6, 12, 13, 14), (7, 15))),
    ],
)
def test_cores_are_divided(cores, place, threads, share):
    assert divide(cores, *place, Wish(threads)) == share


@given(CORES, SIZES)
def test_ranks_never_get_more_threads_than_there_are_cores(cores, size):
    shares = shares_of(cores, size, Wish())
    assert len({share.threads for share in shares}) == 1
    assert shares[0].threads * size <= cores.usable or shares[0].threads == 1


@given(CORES, SIZES, WISHES)
def test_a_wish_comes_true(cores, size, wish):
    for share in shares_of(cores, size, wish):
        assert share.threads == (wish.threads or share.threads)
        assert not wish.daemon_on or share.daemon_on == tuple(sorted(wish.daemon_on))


@given(CORES, SIZES, WISHES)
def test_ranks_are_bound_to_cores_of_their_own_and_to_whole_ones(cores, size, wish):
    bound = [share.bound_to for share in shares_of(cores, size, wish) if share.bound_to]
    taken = [cpu for cpus in bound for cpu in cpus]
    assert len(bound) in {0, size}
    assert len(taken) == len(set(taken))
    assert set(taken) <= {cpu for core in cores.threads for cpu in core}
    assert all(set(core) <= set(taken) or not set(core) & set(taken) for core in cores.threads)


@given(st.integers(1, 12), st.integers(1, 4), st.data())
def test_daemons_have_cores_where_nobody_computes_and_not_many_share_one(size, threads, data):
    count = size * threads + data.draw(st.integers(-(-size // 2), 2 * size), label="spare")
    cores = Cores(tuple((core, core + 100) for core in range(count)))
    shares = shares_of(cores, size, Wish(threads))
    computing = {cpu for share in shares for cpu in share.bound_to}
    daemons = [share.daemon_on for share in shares]
    assert all(cpus in cores.threads and not computing & set(cpus) for cpus in daemons)
    assert max(map(daemons.count, daemons)) <= 2
    assert all(len(share.bound_to) >= 2 * share.threads for share in shares)  # two hardware threads a core


@given(CORES, SIZES, st.integers(0, 8))
def test_without_a_spare_core_nothing_is_pinned_away(cores, size, threads):
    shares = shares_of(cores, size, Wish(threads))
    if shares[0].threads * size >= len(cores.threads) or not cores.divisible:
        assert not any(share.daemon_on for share in shares)
    if not cores.divisible:
        assert not any(share.bound_to for share in shares)


@given(st.integers(1, 4), st.integers(1, 16), st.integers(1, 16), st.integers(0, 4))
def test_ranks_that_fit_evenly_into_packages_never_straddle_two(packages, width, each, threads):
    cores, size = flat(packages * width), packages * each
    assume(each * (threads or 1) <= width)
    for share in shares_of(cores, size, Wish(threads)):
        places = {cpu // width for cpu in (*share.bound_to, *share.daemon_on)}
        assert len(places) <= 1


def test_a_wish_is_read_from_the_options_and_the_environment():
    user = {"OMP_NUM_THREADS": "7", "COORDD_DAEMON_CORES": "0,6-7"}
    assert Wish.of(0, user) == Wish(7, frozenset({0, 6, 7}))
    assert Wish.of(2, {}) == Wish(2)
    with pytest.raises(ConfigError, match="COORDD_DAEMON_CORES='all' is not usable"):
        Wish.of(0, {"COORDD_DAEMON_CORES": "all"})


@pytest.mark.parametrize(
    ("cores", "size", "wish", "text"),
    [
        (flat(2), 1, Wish(), "1 rank of 2 threads on 2 cores"),
        (flat(2), 2, Wish(), "2 ranks of 1 thread on 2 cores, each with its daemon on its own: 0 and 1"),
        (flat(2), 4, Wish(), "4 ranks of 1 thread on 2 cores, which they take turns on"),
        (EIGHT, 2, Wish(), "2 ranks of 4 threads on 8 cores, each with its daemon on its own: 0-3 and 4-7"),
        (EIGHT, 2, Wish(3), "2 ranks of 3 threads on 8 cores: they compute on 0-2 and 4-6, daemons on 3 and 7"),
        (EIGHT, 8, Wish(), "8 ranks of 1 thread on 8 cores, each with its daemon on its own: 0, 1, … and 7"),
        (
            flat(10),
            5,
            Wish(1),
            "5 ranks of 1 thread on 10 cores: they compute on 0, 2, … and 8, daemons on 1, 3, … and 9",
        ),
        (HYPER, 2, Wish(3), "2 ranks of 3 threads on 8 cores: they compute on 0-2 and 4-6, daemons on 3 and 7"),
        (
            EIGHT,
            2,
            Wish(0, frozenset({6, 7})),
            "2 ranks of 3 threads on 8 cores: they compute on 0-2 and 3-5, daemons on 6-7",
        ),
        (flat(2), 2, Wish(0, frozenset({1})), "2 ranks of 1 thread on 2 cores, daemons on 1"),
        (flat(7), 2, Wish(), "2 ranks of 3 threads on 7 cores: they compute on 0-2 and 3-5, daemons on 6"),
    ],
)
def test_one_line_says_how_the_cores_are_shared(cores, size, wish, text):
    assert describe(cores, size, wish) == text


def test_the_line_tells_of_no_binding_where_there_is_none():
    assert describe(EIGHT, 2, Wish(3), bind=False) == "2 ranks of 3 threads on 8 cores, which daemons share"
    own = Wish(3, frozenset({7}))
    assert describe(EIGHT, 2, own, bind=False) == "2 ranks of 3 threads on 8 cores, daemons on 7"


@given(CORES, SIZES, WISHES)
def test_the_line_is_short(cores, size, wish):
    assert len(describe(cores, size, wish)) < 250


def test_what_the_user_has_set_is_kept_unless_told_otherwise():
    user = {"OMP_NUM_THREADS": "7"}
    assert thread_variables(2, user, insist=False) == {}
    assert thread_variables(2, {}, insist=False) == {"OMP_NUM_THREADS": "2", "TF_NUM_INTRAOP_THREADS": "2"}
    assert "MKL_NUM_THREADS" not in thread_variables(2, {"MKL_NUM_THREADS": "3"}, insist=False)
    assert set(thread_variables(2, user, insist=True).values()) == {"2"}
    assert "MKL_NUM_THREADS" in thread_variables(2, user, insist=True)
