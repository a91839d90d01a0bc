"""A batch as microbatches."""

from __future__ import annotations

import pytest
import torch

from coordd.errors import ArgumentError
from coordd.pipeline.batch import Batch
from coordd.pipeline.microbatch import cut
from coordd_torch.pipeline.rows import joined, rows_of, taken


def batch(rows, count, **options):
    x = {"x": torch.arange(rows), "scale": 2, "none": None}
    return Batch(
        x, (torch.arange(rows) * 10, "all"), cut(rows, count), take=taken, named=lambda values: values, **options
    )


def test_all_tensors_are_cut_and_nothing_else():
    made = batch(5, 2)
    assert made.count == 2
    assert [made.inputs(number)["x"].tolist() for number in range(2)] == [[0, 1, 2], [3, 4]]
    assert made.inputs(1)["scale"] == 2
    assert made.inputs(1)["none"] is None
    assert made.targets(1)[0].tolist() == [30, 40]
    assert made.targets(1)[1] == "all"


def test_microbatches_count_by_their_rows():
    made = batch(10, 4)
    assert [made.weight(number) for number in range(4)] == [0.3, 0.2, 0.3, 0.2]
    assert sum(made.share(number) for number in range(4)) == pytest.approx(1.0)


def test_each_step_has_a_weight_of_its_own():
    made = batch(10, 4, steps=2)
    assert [made.weight(number) for number in range(4)] == [0.6, 0.4, 0.6, 0.4]
    assert [made.share(number) for number in range(4)] == [0.3, 0.2, 0.3, 0.2]


def test_rows_are_those_of_all_tensors():
    assert rows_of((torch.ones(3, 2), {"a": torch.ones(3), "b": torch.tensor(1.0)}, 7)) == 3
    with pytest.raises(ArgumentError, match="equally many rows to be cut into microbatches, not 3, 4"):
        rows_of((torch.ones(3), torch.ones(4)))
    with pytest.raises(ArgumentError, match="not none"):
        rows_of((1, None))


def test_microbatches_may_count_by_what_they_hold():
    made = batch(6, 3, weigh=lambda x, y: (x["x"] > 2).sum() + 0 * y[0].sum())
    assert [made.weight(number) for number in range(3)] == pytest.approx([0.0, 1 / 3, 2 / 3])
    assert [batch(4, 2, weigh=lambda *_: 0).weight(number) for number in range(2)] == [0.0, 0.0]
    for wrong in (-1, float("nan"), float("inf")):
        with pytest.raises(ArgumentError, match="a microbatch cannot have a weight of"):
            batch(4, 2, weigh=lambda *_, wrong=wrong: wrong)


def test_outputs_are_joined_by_rows():
    found = joined(
        [{"y": torch.ones(2, 3), "loss": torch.tensor(1.0), "n": 1}, {"y": torch.ones(1, 3), "loss": 2, "n": 2}],
        [2, 1],
    )
    assert found["y"].shape == (3, 3)
    assert found["loss"] == [torch.tensor(1.0), 2]
    assert found["n"] == [1, 2]


def test_what_has_its_rows_elsewhere_is_not_joined():
    parts = [(torch.ones(2, 3), {"hidden": torch.ones(1, 2, 6)}) for _ in range(2)]
    with pytest.raises(ArgumentError, match=r"output\[1\]\['hidden'\] has shape \(1, 2, 6\) for 2 rows"):
        joined(parts, [2, 2])


def test_rows_are_taken_of_what_has_rows():
    found = taken({"x": torch.arange(4), "scale": torch.tensor(2.0), "n": 3}, torch.tensor([3, 1]))
    assert (found["x"].tolist(), found["scale"].item(), found["n"]) == ([3, 1], 2.0, 3)
