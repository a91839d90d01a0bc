"""Plans carried out in virtual time, good ones and bad ones."""

from __future__ import annotations

import pytest

from coordd.pipeline.plan import Plan
from coordd.pipeline.schedules.schedule import gpipe, one_f_one_b
from coordd.pipeline.simulate import Costs, PlanError, simulate
from tests.pipeline.plans import chained


def written(*lines: str, microbatches: int = 1) -> Plan:
    places = " | ".join(str(rank) for rank in range(len(lines)))
    actions = "\n".join(f"{rank}: {line}" for rank, line in enumerate(lines))
    return Plan.parse(f"mine, {microbatches} microbatches, stages on {places}\n{actions}")


def test_when_everything_happens():
    costs = Costs([1.0, 2.0], [3.0, 4.0], [0.5, 0.25], transfer={(0, 1): 10.0}, volume={(0, 1): 7})
    found = simulate(chained(gpipe(2, 1)), costs)
    assert [(str(span.action), span.begin, span.end) for mine in found.spans for span in mine] == [
        ("0F0", 0.0, 1.0),
        ("0B0", 27.25, 30.75),
        ("1F0", 11.0, 13.0),
        ("1B0", 13.0, 17.25),
    ]
    assert (found.makespan, found.volume, found.busy(1)) == (30.75, 14, 6.25)
    assert found.bubble == pytest.approx(1 - (4.5 + 6.25) / 2 / 30.75)


def test_a_step_waits_for_the_reduction():
    plan = chained(gpipe(2, 1, replicas=2))
    assert simulate(plan, Costs([1.0] * 2, [1.0] * 2, [1.0] * 2, reduce=[5.0, 0.0])).makespan == 6 + 5


def test_a_sender_waits_where_there_is_no_room():
    late = written("0F0 0SEND_F0>1 0F1 0SEND_F1>1", "1F0 1RECV_F0<0 1F1 1RECV_F1<0", microbatches=2)
    assert [len(simulate_all(late, depth)) for depth in (None, 2, 1)] == [0, 0, 0]
    assert "rank 0 at 0SEND_F0>1" in simulate_all(written("0F0 0SEND_F0>1", "1F0"), 0)


def simulate_all(plan: Plan, depth: int | None) -> str:
    """What is wrong with a plan that has no backward passes, but for that."""
    try:
        simulate(plan, depth=depth)
    except PlanError as error:
        return "" if "undone" in str(error) else str(error)
    return ""


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        (["0F0 0F0"], "rank 0 do 0F0, but it was done before"),
        (["0B0 0F0"], "rank 0 do 0B0, but it is too early"),
        (["0F0 0W0 0I0"], "rank 0 do 0W0, but it is too early"),
        (["0STEP"], "leaves microbatch 0 undone in stage 0"),
        (["0F0 0I0 0W0", "1F0"], "leaves microbatch 0 undone in stage 1"),
        (["1F0", "0F0"], "rank 1 do 0F0, but it has no business with it"),
        (["0SEND_F0>1 0F0", "1F0"], "rank 0 do 0SEND_F0>1, but there is nothing to send yet"),
        (
            ["0F0 0RECV_B0<1 0B0 0SEND_F0>1", "1RECV_F0<0 1F0 1B0 1SEND_B0>0"],
            "never ends: rank 0 at 0B0, rank 1 at 1F0 wait for each other",
        ),
    ],
)
def test_a_plan_that_cannot_be_carried_out_is_told(lines, text):
    with pytest.raises(PlanError, match=text):
        simulate(written(*lines))


def test_the_activations_of_one_forward_one_backward_do_not_grow_with_the_microbatches():
    costs = Costs([1.0] * 3, [1.0] * 3, [1.0] * 3, activation=[10.0, 20.0, 30.0])
    peaks = [simulate(chained(one_f_one_b(3, count)), costs).peaks for count in (3, 6, 60)]
    assert peaks == [(30.0, 40.0, 30.0)] * 3
