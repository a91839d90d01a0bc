"""The graph of layers: what needs each other is found, stays together, and is named where a cut would divide it."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordd.errors import ArgumentError
from coordd.pipeline.graph import Layer, check_cuts, condense, cycles, tied

# Figure 2 of the paper: A ─▶ (B ─▶ C ─▶ D ─▶ B) ─▶ E
FIGURE = (
    Layer("A", (), "a"),
    Layer("B", (0,), "b"),
    Layer("C", (1,), "c"),
    Layer("D", (2,), "d"),
    Layer("B again", (3,), "b"),
    Layer("E", (4,), "e"),
)


@st.composite
def models(draw, most: int = 9) -> list[Layer]:
    count = draw(st.integers(0, most))
    layers = []
    for at in range(count):
        reads = draw(st.lists(st.integers(0, at - 1), max_size=3, unique=True)) if at else []
        module = draw(st.sampled_from(["", "a", "b", "c"]))
        layers.append(Layer(f"layer{at}", tuple(reads), module, tuple(draw(st.sets(st.sampled_from("xyz"))))))
    return layers


@st.composite
def staged(draw) -> tuple[list[Layer], list[int]]:
    layers = draw(models())
    return layers, sorted(draw(st.lists(st.integers(0, 4), min_size=len(layers), max_size=len(layers))))


def same(layers: list[Layer], one: int, other: int, reuse: frozenset[str]) -> bool:
    module = layers[one].module
    return one == other or (module != "" and module not in reuse and module == layers[other].module)


def reachable(layers: list[Layer], reuse: frozenset[str]) -> list[list[bool]]:
    """From each layer each layer, over data and from one call of a module to another (Warshall)."""
    count = range(len(layers))
    reach = [[same(layers, a, b, reuse) or a in layers[b].reads for b in count] for a in count]
    for middle, a, b in product(count, count, count):
        reach[a][b] |= reach[a][middle] and reach[middle][b]
    return reach


@st.composite
def reusing(draw) -> tuple[list[Layer], frozenset[str]]:
    layers = draw(models())
    modules = sorted({layer.module for layer in layers} - {""})
    return layers, frozenset(draw(st.sets(st.sampled_from(modules)))) if modules else frozenset()


def refused(layers: list[Layer], cut: int, reuse: frozenset[str]) -> bool:
    try:
        check_cuts(layers, [cut], reuse)
    except ArgumentError:
        return True
    return False


def test_the_figure_of_the_paper():
    assert cycles(FIGURE) == [(1, 2, 3, 4)]
    assert condense(FIGURE) == [range(1), range(1, 5), range(5, 6)]
    check_cuts(FIGURE, [1, 5])


def test_a_cut_through_a_cycle_is_refused_with_its_layers_and_what_to_do():
    with pytest.raises(ArgumentError) as error:
        check_cuts(FIGURE, [1, 3])
    assert str(error.value) == (
        "the cut before layer 3 ('D') goes through layers that form a cycle and must share a stage: "
        "'B', 'C', 'D', 'B again'; start that stage at layer 1 ('B') or layer 5 ('E'), "
        "or let each side have a copy of what both call, with reuse=['b']"
    )
    check_cuts(FIGURE, [1, 3], reuse=["b"])
    assert condense(FIGURE, reuse=["b"]) == [range(at, at + 1) for at in range(6)]


def test_where_all_is_one_cycle_no_other_place_is_offered():
    with pytest.raises(ArgumentError, match="leave that cut out, or let"):
        check_cuts([Layer("B", (), "b"), Layer("B again", (0,), "b")], [1])


@given(reusing())
def test_cycles_are_what_reaches_each_other(model):
    layers, reuse = model
    reach = reachable(layers, reuse)
    count = range(len(layers))
    groups = {tuple(b for b in count if reach[a][b] and reach[b][a]) for a in count}
    assert cycles(layers, reuse) == sorted(group for group in groups if len(group) > 1)


@given(reusing())
def test_runs_are_the_finest_that_keep_every_cycle_whole(model):
    layers, reuse = model
    runs = condense(layers, reuse)
    assert [at for run in runs for at in run] == list(range(len(layers)))
    open_cuts = [run.start for run in runs[1:]]
    check_cuts(layers, open_cuts, reuse)
    assert open_cuts == [cut for cut in range(1, len(layers)) if not refused(layers, cut, reuse)]


@given(reusing())
def test_reusing_what_the_error_says_opens_the_cut(model):
    layers, reuse = model
    for cut in range(1, len(layers)):
        try:
            check_cuts(layers, [cut], reuse)
        except ArgumentError as error:
            named = str(error).rpartition("reuse=")[2]
            check_cuts(layers, [cut], reuse | {name for name in "abc" if repr(name) in named})


def test_thousands_of_layers_are_no_recursion():
    chain = [Layer(f"{at}", (at - 1,) if at else (), f"m{at}") for at in range(20_000)]
    assert cycles(chain) == []
    closed = [*chain, Layer("again", (len(chain) - 1,), "m0")]
    assert condense(closed) == [range(20_001)]


def test_a_module_without_state_may_be_called_anywhere():
    assert cycles([Layer("relu"), Layer("conv", (0,), "conv"), Layer("relu again", (1,))]) == []


@pytest.mark.parametrize("read", [1, 2, -1])
def test_reading_what_comes_later_is_refused(read):
    with pytest.raises(ArgumentError, match=rf"layer 1 \('b'\) reads layer {read}, which does not come before it"):
        cycles([Layer("a"), Layer("b", (read,))])


def test_reuse_of_an_unknown_module_is_refused():
    with pytest.raises(ArgumentError, match="reuse names 'x', which no layer calls; the modules are a, b, c, d, e"):
        condense(FIGURE, reuse=["x"])


@given(staged())
def test_tied_parameters_are_those_of_two_stages_or_more(model):
    layers, stages = model
    for key in "xyz":
        holders = sorted({stages[at] for at, layer in enumerate(layers) if key in layer.parameters})
        assert tied(layers, stages).get(key, ()) == (tuple(holders) if len(holders) > 1 else ())


def test_stages_that_are_no_runs_are_refused():
    with pytest.raises(ArgumentError, match="layer 0 is in stage 1 and layer 1 in 0: stages are runs"):
        tied([Layer("a"), Layer("b")], [1, 0])
    with pytest.raises(ArgumentError, match="there are 1 layers, and stages for 2"):
        tied([Layer("a")], [0, 1])
