"""Who sits where."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from coordd.host.world import World

worlds = st.lists(st.sampled_from("abc"), min_size=1, max_size=12).flatmap(
    lambda hosts: st.builds(World, st.integers(0, len(hosts) - 1), st.just(tuple(hosts)))
)


def test_one_host():
    world = World(1, ("a", "a", "a"))
    assert (world.size, world.local_rank, world.local_size) == (3, 1, 3)
    assert (world.cross_rank, world.cross_size, world.is_homogeneous) == (0, 1, True)


def test_two_hosts_with_two_ranks_each():
    world = World(3, ("a", "a", "b", "b"))
    assert (world.host, world.neighbours) == ("b", (2, 3))
    assert (world.local_rank, world.local_size, world.cross_rank, world.cross_size) == (1, 2, 1, 2)


def test_ranks_may_be_dealt_out_in_turn():
    world = World(2, ("a", "b", "a", "b"))
    assert (world.neighbours, world.local_rank, world.cross_rank, world.cross_size) == ((0, 2), 1, 0, 2)


def test_hosts_of_different_size():
    world = World(2, ("a", "a", "a", "b"))
    assert not world.is_homogeneous
    assert (world.local_rank, world.cross_rank, world.cross_size) == (2, 0, 1)


@given(worlds)
def test_places_are_counted_from_zero(world):
    assert world.neighbours[world.local_rank] == world.rank
    assert 0 <= world.cross_rank < world.cross_size <= len(set(world.hosts))


@given(worlds)
def test_local_and_cross_places_name_every_rank(world):
    seen = [World(rank, world.hosts) for rank in range(world.size)]
    assert len({(each.host, each.local_rank) for each in seen}) == world.size
    assert len({(each.local_rank, each.cross_rank) for each in seen}) == world.size


@given(worlds)
def test_a_world_is_a_value(world):
    assert World(world.rank, world.hosts) == world
    assert World(world.rank, world.hosts, epoch=1) != world


def test_containers_of_one_machine_share_its_devices_but_no_memory():
    world = World(3, ("a", "a", "a/2", "a/2", "b"), machines=("a", "a", "a", "a", "b"))
    assert world.neighbours == (2, 3)
    assert (world.local_rank, world.local_size, world.cross_rank, world.cross_size) == (3, 4, 0, 1)
    assert not world.is_homogeneous
