"""Who adds up what: every slice once on every host, and the same answer wherever it is asked."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from coordd.collectives.hierarchy import Route, route

worlds = st.lists(st.sampled_from("abcd"), min_size=1, max_size=12)


@st.composite
def members(draw: st.DrawFn) -> tuple[list[str], list[int]]:
    """A world, and some of its ranks."""
    hosts = draw(worlds)
    chosen = draw(st.sets(st.integers(0, len(hosts) - 1), min_size=1))
    return hosts, sorted(chosen)


def groups(hosts: list[str], ranks: list[int]) -> list[list[int]]:
    """The ranks of each host, by brute force."""
    names = sorted({hosts[rank] for rank in ranks})
    return [[rank for rank in ranks if hosts[rank] == name] for name in names]


@given(members())
def test_neighbours_are_the_members_on_this_host(case):
    hosts, ranks = case
    for group in groups(hosts, ranks):
        assert all(route(rank, ranks, hosts).neighbours == tuple(group) for rank in group)


@given(members())
def test_every_host_has_as_many_owners_as_the_smallest_has_members(case):
    hosts, ranks = case
    smallest = min(len(group) for group in groups(hosts, ranks))
    assert {route(rank, ranks, hosts).owners for rank in ranks} == {smallest}


@given(members())
def test_the_owners_of_a_slice_are_one_a_host_and_know_each_other(case):
    hosts, ranks = case
    divided = groups(hosts, ranks)
    for group in divided:
        for place, rank in enumerate(group):
            way = route(rank, ranks, hosts)
            wanted = {other[place] for other in divided} if place < way.owners and len(divided) > 1 else set()
            assert set(way.peers) == wanted
            assert len(way.peers) == len(wanted)
            assert all(route(peer, ranks, hosts).peers == way.peers for peer in way.peers)


def test_three_ranks_here_and_one_there():
    """The first of the three has the only slice; the two others look on."""
    hosts = ["here", "there", "here", "here"]
    assert route(0, range(4), hosts) == Route((0, 2, 3), owners=1, peers=(0, 1))
    assert route(1, range(4), hosts) == Route((1,), owners=1, peers=(0, 1))
    assert route(2, range(4), hosts) == route(3, range(4), hosts) == Route((0, 2, 3), owners=1, peers=())


def test_one_host_needs_no_other():
    assert route(1, [0, 1, 2], ["a"] * 3) == Route((0, 1, 2), owners=3, peers=())
