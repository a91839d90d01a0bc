"""Process sets as users have them, and grids, on ranks that are threads."""

from __future__ import annotations

import pytest
import torch

import coordd.torch as cd
from tests.local_ranks import each_rank


def test_a_process_set_knows_this_rank():
    def body(rank):
        some = cd.ProcessSet([3, 1])
        assert (some.size(), some.included(), some.rank()) == (2, rank in {1, 3}, {1: 0, 3: 1}.get(rank, -1))
        everybody = cd.global_process_set
        assert (everybody.size(), everybody.included(), everybody.rank()) == (4, True, rank)
        assert cd.add_process_set([1, 3]) == some
        assert cd.add_process_set(some).process_set_id == "1,3"
        assert cd.remove_process_set(some)
        assert not cd.remove_process_set(everybody)
        with pytest.raises(cd.ArgumentError, match="do not exist in a world of 4"):
            cd.add_process_set([2, 4])

    each_rank(4, body)


def test_axes_of_a_grid_are_process_sets():
    def body(rank):
        grid = cd.Grid(dp=2, pp=2, tp=-1)
        place = {"dp": rank // 4, "pp": rank // 2 % 2, "tp": rank % 2}
        assert grid.place == place
        assert grid.tp.ranks == (rank // 2 * 2, rank // 2 * 2 + 1)
        assert grid.dp.ranks == (rank % 4, rank % 4 + 4)
        assert set(grid.along("pp", "tp").ranks) == {other for other in range(8) if other // 4 == rank // 4}
        assert grid.along("tp", of=5).ranks == (4, 5)
        assert grid.rank(dp=1, pp=0, tp=1) == 5
        assert grid.rank(tp=place["tp"]) == rank
        assert repr(grid) == "Grid(dp=2, pp=2, tp=2)"
        total = cd.allreduce(torch.tensor(float(rank)), op=cd.Sum, process_set=grid.pp)
        assert total == sum(grid.pp.ranks)

    each_rank(8, body)


@pytest.mark.parametrize(
    ("ask", "text"),
    [
        (lambda: cd.Grid(dp=3), "has 3 places, and there are 2 ranks"),
        (lambda: cd.Grid(dp=-1, pp=3), "make them equal"),
        (lambda: cd.Grid(dp=0, pp=-1), "make them equal"),
        (lambda: cd.Grid(place=2), "no axis can be called place"),
        (lambda: cd.Grid(dp=2).along("tp"), "no axis tp: there are dp"),
        (lambda: cd.Grid(dp=2).rank(tp=0), "no axis tp"),
        (lambda: cd.Grid(dp=2).rank(dp=2), "dp goes from 0 to 1"),
    ],
)
def test_a_grid_that_cannot_be_is_refused(ask, text):
    def body(_):
        with pytest.raises(cd.ArgumentError, match=text):
            ask()

    each_rank(2, body)


def test_there_is_no_other_axis():
    def body(_):
        with pytest.raises(AttributeError, match="no axis 'tp': there are dp"):
            cd.Grid(dp=2).tp  # noqa: B018 - looking is the point

    each_rank(2, body)


def test_a_set_that_waits_does_not_hold_another_up():
    """Rank 0 belongs to both; in one of them rank 1 is late."""

    def body(rank):
        late, busy = cd.ProcessSet([0, 1]), cd.ProcessSet([0, 2])
        if rank == 1:
            cd.recv(torch.zeros(1), 0, "go")
        waiting = (
            [cd.allreduce_async(torch.ones(2), name=f"late.{k}", process_set=late) for k in range(40)]
            if rank < 2
            else []
        )
        if rank in {0, 2}:
            for step in range(100):
                assert cd.allreduce(torch.ones(1000), name=f"busy.{step % 9}", op=cd.Sum, process_set=busy)[0] == 2
        if rank == 0:
            assert not any(handle.poll() for handle in waiting)
            cd.send(torch.zeros(1), 1, "go")
        for handle in waiting:
            assert cd.synchronize(handle).tolist() == [1.0, 1.0]

    each_rank(3, body)
