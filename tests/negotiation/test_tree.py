"""Who reports to whom, whatever the hosts are."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from coordd.negotiation.tree import NOBODY, Post, post, superiors, tree

many_hosts = st.lists(st.sampled_from("abcdefghij"), min_size=1, max_size=60)
fan_ins = st.integers(2, 9)


def way_up(posts: list[Post], rank: int) -> list[int]:
    ranks = [rank]
    while posts[ranks[-1]].parent != NOBODY:
        ranks.append(posts[ranks[-1]].parent)
    return ranks


@given(many_hosts, fan_ins)
def test_every_rank_is_reached_once_from_rank_0(hosts, fan_in):
    posts = tree(hosts, fan_in)
    children = [child for place in posts for child in place.children]
    assert sorted(children) == list(range(1, len(hosts)))
    assert all(posts[child].parent == place.rank for place in posts for child in place.children)
    assert {way_up(posts, rank)[-1] for rank in range(len(hosts))} == {0}


@given(many_hosts, fan_ins)
def test_a_span_is_all_that_is_below_and_the_rank_itself(hosts, fan_in):
    posts = tree(hosts, fan_in)
    for place in posts:
        below = sum(1 << rank for rank in range(len(hosts)) if place.rank in way_up(posts, rank))
        assert place.span == below
        assert place.spans[place.rank] == 1 << place.rank
        assert all(place.spans[child] == posts[child].span for child in place.children)


@given(many_hosts, fan_ins)
def test_fan_in_and_depth_are_bounded(hosts, fan_in):
    if len(set(hosts)) == 1 or len(hosts) <= fan_in:
        return
    posts = tree(hosts, fan_in)
    for place in posts:
        mine = [hosts[child] == hosts[place.rank] for child in place.children]
        assert mine.count(True) <= fan_in
        assert mine.count(False) <= fan_in
    levels = next(depth for depth in range(9) if sum(fan_in**level for level in range(depth + 1)) >= len(hosts))
    assert max(len(way_up(posts, rank)) - 1 for rank in range(len(hosts))) <= 2 * levels


@given(many_hosts, fan_ins)
def test_the_first_rank_of_a_host_speaks_for_its_host(hosts, fan_in):
    if len(hosts) <= fan_in:
        return
    posts = tree(hosts, fan_in)
    for place in posts[1:]:
        if hosts.index(hosts[place.rank]) == place.rank:
            assert hosts.index(hosts[place.parent]) == place.parent
        else:
            assert hosts[place.parent] == hosts[place.rank]


@given(st.integers(1, 200), fan_ins)
def test_one_host_is_a_star(size, fan_in):
    posts = tree(["h"] * size, fan_in)
    assert posts[0].is_star
    assert [place.parent for place in posts] == [NOBODY] + [0] * (size - 1)


def test_few_ranks_are_a_star_wherever_they_are():
    assert [place.parent for place in tree(list("abc"), 3)] == [NOBODY, 0, 0]
    assert [place.parent for place in tree(list("abcd"), 3)] == [NOBODY, 0, 0, 0]
    assert [place.parent for place in tree(list("aabb"), 3)] == [NOBODY, 0, 0, 2]
    assert tree(list("abcd"), 4)[0].is_star
    assert not tree(list("aabb"), 3)[0].is_star


@given(many_hosts, fan_ins, st.data())
def test_the_neighbour_toward_a_rank_is_one_step_nearer(hosts, fan_in, data):
    posts = tree(hosts, fan_in)
    here, there = (data.draw(st.integers(0, len(hosts) - 1)) for _ in range(2))
    if here == there:
        return
    steps, at = 0, here
    while at != there:
        at, steps = posts[at].toward(there), steps + 1
        assert steps < len(hosts)
    assert post(here, hosts, fan_in) == posts[here]


def test_ten_thousand_ranks_are_four_hops_away_at_most():
    posts = tree([f"h{rank // 8}" for rank in range(10_000)], 16)
    assert max(len(way_up(posts, rank)) - 1 for rank in range(10_000)) == 4
    assert len(posts[0].children) == 23


@given(many_hosts, fan_ins)
def test_superiors_are_the_way_up_without_the_rank_itself(hosts, fan_in):
    posts = tree(hosts, fan_in)
    for rank in range(len(hosts)):
        assert [rank, *superiors(rank, hosts, fan_in)] == way_up(posts, rank)
