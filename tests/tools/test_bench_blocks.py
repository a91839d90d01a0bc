import pytest

from coordd_tools.bench.blocks import Block, by_subject, join


def test_mean_seconds_is_the_wall_time_of_one_call():
    assert Block("gpt", "ddp", (1.0, 2.0, 3.0)).mean_seconds == 2.0


def test_a_call_that_did_several_parts_counts_by_the_part():
    whole = Block("4", "memory", (1.0, 2.0), cpu_seconds=3.0, switches=5)
    assert whole.divided(4) == Block("4", "memory", (0.25, 0.5), cpu_seconds=0.75, switches=5)


def test_join_puts_the_ranks_side_by_side():
    first = [Block("gpt", "none", (1.0,)), Block("gpt", "ddp", (2.0,))]
    second = [Block("gpt", "none", (3.0,)), Block("gpt", "ddp", (4.0,))]
    assert join([first, second]) == [(first[0], second[0]), (first[1], second[1])]


def test_a_rank_may_have_no_calls_where_others_have():
    row = Block("4", "idle", (1.0, 2.0)), Block("4", "idle", ())
    assert join([[block] for block in row]) == [row]


@pytest.mark.parametrize(
    "other",
    [
        [],
        [Block("mlp", "none", (1.0,))],
        [Block("gpt", "ddp", (1.0,))],
        [Block("gpt", "none", (1.0, 1.0))],
    ],
    ids=["fewer blocks", "another subject", "another engine", "more calls"],
)
def test_join_refuses_ranks_that_did_not_run_the_same(other):
    with pytest.raises(ValueError, match=r"different blocks|zip"):
        join([[Block("gpt", "none", (1.0,))], other])


def test_by_subject_collects_all_rounds_in_their_order():
    rounds = [(Block("gpt", "ddp", (3.0,)),), (Block("mlp", "ddp", (1.0,)),), (Block("gpt", "ddp", (2.0, 5.0)),)]
    found = by_subject(rounds, lambda row: row[0].seconds)
    assert found == {("gpt", "ddp"): [3.0, 2.0, 5.0], ("mlp", "ddp"): [1.0]}
