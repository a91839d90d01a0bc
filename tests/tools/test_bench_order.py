from itertools import permutations, product

from hypothesis import given
from hypothesis import strategies as st

from coordd_tools.bench.order import turns

ENGINES = st.lists(st.text(min_size=1, max_size=3), max_size=6, unique=True)


def test_three_engines_see_all_six_orders_in_six_rounds():
    drawn = ["".join(turns("ABC", number)) for number in range(6)]
    assert drawn == ["ABC", "CBA", "BCA", "ACB", "CAB", "BAC"]
    assert sorted(drawn) == sorted("".join(order) for order in permutations("ABC"))


@given(ENGINES, st.integers(0, 1000))
def test_every_engine_has_one_turn_a_round(engines, number):
    assert sorted(turns(engines, number)) == sorted(engines)


@given(ENGINES)
def test_every_engine_takes_every_place_equally_often(engines):
    rounds = [turns(engines, number) for number in range(2 * len(engines))]
    for place, engine in product(range(len(engines)), engines):
        assert sum(order[place] == engine for order in rounds) == 2
