from __future__ import annotations

import dataclasses
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordd.config import Config, Knob, aliased, knobs, unread
from coordd.errors import ConfigError, CoorddError

KNOBS = {knob.name: knob for knob in knobs()}
ALIASED = [knob for knob in knobs() if knob.alias]
DEFAULTS = Config()


def load(**environment: str) -> Config:
    return Config.load(environment)


def legal_values(knob: Knob) -> st.SearchStrategy:
    if knob.choices:
        return st.sampled_from(knob.choices)
    values = {
        bool: st.booleans(),
        int: st.integers(int(knob.low or 0), int(knob.high or 0)),
        float: st.floats(knob.low, knob.high),
        str: st.text(string.ascii_letters + string.digits + "-_", min_size=1),
    }[knob.kind]
    return st.none() | values if knob.optional else values


configs = st.builds(Config, **{name: legal_values(knob) for name, knob in KNOBS.items()})
knobs_and_values = st.sampled_from(knobs()).flatmap(lambda knob: st.tuples(st.just(knob), legal_values(knob)))


# The table of knobs


def test_every_field_is_a_knob_in_the_order_of_declaration():
    assert [knob.name for knob in knobs()] == [row.name for row in dataclasses.fields(Config)]


@pytest.mark.parametrize("knob", knobs(), ids=lambda knob: knob.name)
def test_every_knob_is_whole(knob):
    assert knob.about
    assert knob.legal
    assert knob.default == getattr(DEFAULTS, knob.name)
    assert not knob.alias or knob.alias.startswith("HOROVOD_")
    assert (knob.low is None) == (knob.high is None)
    assert (knob.low is not None) == (knob.kind in {int, float}), "a number needs a range"


def test_names_derive_from_the_field():
    assert KNOBS["fusion_mb"].variable == "COORDD_FUSION_MB"
    assert KNOBS["fusion_mb"].flag == "--fusion-mb"


def test_no_variable_belongs_to_two_knobs():
    variables = [name for knob in knobs() for name in (knob.variable, knob.alias) if name]
    assert len(variables) == len(set(variables))


@pytest.mark.parametrize(
    ("name", "legal"),
    [
        ("fusion_mb", "a number from 0 to 65536"),
        ("cache_capacity", "a whole number from 0 to 1048576"),
        ("stall_seconds", "a number from 0.05 to 86400, or empty"),
        ("log_level", "one of debug, info, warning, error"),
        ("transport", "a word"),
        ("interface", "a word, or empty"),
    ],
)
def test_legal_values_are_told_in_words(name, legal):
    assert KNOBS[name].legal == legal


def test_the_legal_switches_are_those_that_are_read():
    words = KNOBS["stall_check"].legal.removeprefix("one of ").split(", ")
    assert {KNOBS["stall_check"].parse(word, source="") for word in words} == {True, False}


# A configuration as a value


def test_a_configuration_is_a_value():
    assert Config(fusion_mb=8) == Config(fusion_mb=8)
    assert hash(Config(fusion_mb=8)) == hash(Config(fusion_mb=8))
    with pytest.raises(dataclasses.FrozenInstanceError):
        DEFAULTS.fusion_mb = 1


def test_the_digest_tells_settings_apart_that_must_be_equal_on_all_ranks():
    assert Config(interface="eth0", daemon_cores="3").digest == DEFAULTS.digest
    assert DEFAULTS.digest == "the defaults"
    assert Config(fusion_mb=8, stall_check=False).digest == "fusion_mb=8, stall_check=False"


@pytest.mark.parametrize(
    "wrong",
    [
        {"fusion_mb": "32"},
        {"fusion_mb": True},
        {"fusion_mb": -1},
        {"fusion_mb": float("nan")},
        {"fusion_mb": float("inf")},
        {"fusion_mb": None},
        {"cache_capacity": 1.0},
        {"cache_capacity": 2**20 + 1},
        {"cache_capacity": False},
        {"stall_check": 1},
        {"stall_check": None},
        {"stall_seconds": 0},
        {"log_level": "loud"},
        {"transport": ""},
        {"transport": "two words"},
        {"transport": 3},
    ],
    ids=str,
)
def test_an_illegal_argument_is_refused_by_name_with_what_is_legal(wrong):
    (name, value), *_ = wrong.items()
    with pytest.raises(ConfigError) as error:
        Config(**wrong)
    assert str(error.value) == f"{name}={value!r} is not usable: give {KNOBS[name].legal}"


def test_the_error_is_ours_and_a_value_error():
    with pytest.raises(ConfigError) as error:
        Config(cycle_ms=-1)
    assert isinstance(error.value, CoorddError)
    assert isinstance(error.value, ValueError)


# Argument, environment, default


def test_an_empty_environment_gives_the_defaults():
    assert load() == DEFAULTS


def test_an_argument_beats_the_environment_which_beats_horovods_which_beats_the_default():
    environment = {"HOROVOD_CYCLE_TIME": "5"}
    assert Config.load(environment).cycle_ms == 5
    environment["COORDD_CYCLE_MS"] = "4"
    assert Config.load(environment).cycle_ms == 4
    assert Config.load(environment, cycle_ms=3).cycle_ms == 3
    assert Config.load(environment, cycle_ms=None).cycle_ms == 4


def test_an_overruled_variable_is_not_even_read():
    assert Config.load({"COORDD_CYCLE_MS": "soon", "HOROVOD_CYCLE_TIME": "later"}, cycle_ms=3).cycle_ms == 3
    assert load(COORDD_CYCLE_MS="4", HOROVOD_CYCLE_TIME="later").cycle_ms == 4


def test_other_variables_are_nobodys_business():
    assert load(PATH="/bin", COORDD_RANK="3", HOROVOD_HIERARCHICAL_ALLREDUCE="1") == DEFAULTS


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("COORDD_FUSION_MBS", "did you mean COORDD_FUSION_MB?"),
        ("COORDD_STALL_SECOND", "did you mean COORDD_STALL_SECONDS?"),
        ("COORDD_FUSION_MIB", "did you mean COORDD_FUSION_MB?"),
        ("COORDD_ZEAL", "`coordd run --help` lists those that there are"),
    ],
)
def test_variables_that_nobody_reads_are_told_with_what_was_meant(name, hint):
    assert unread({name: "1"}) == (f"{name} is no setting of coordd and has no effect; {hint}",)


def test_variables_that_somebody_reads_are_not_told():
    read = dict.fromkeys([knob.variable for knob in knobs()], "1")
    assert unread(read | {"COORDD_LAUNCHED": "1", "HOROVOD_FUSION_THRESHOLD": "1", "PATH": "/bin"}) == ()


def test_unknown_arguments_are_named_beside_the_known_ones():
    with pytest.raises(
        ConfigError, match=r"^no such setting: fusion, zeal; there are alone, as_horovod, .*, transport$"
    ):
        Config.load({}, zeal=1, fusion=2, fusion_mb=3)


def test_loading_does_not_touch_the_environment():
    environment = {"COORDD_FUSION_MB": "8"}
    Config.load(environment)
    assert environment == {"COORDD_FUSION_MB": "8"}


@pytest.mark.parametrize("knob", knobs(), ids=lambda knob: knob.name)
@pytest.mark.parametrize("blank", ["", "  "], ids=["empty", "spaces"])
def test_an_empty_variable_counts_as_not_set(knob, blank):
    assert Config.load({knob.variable: blank, knob.alias: blank}) == DEFAULTS


@given(configs)
def test_every_configuration_survives_the_way_through_the_environment(config):
    given = {knob.variable: getattr(config, knob.name) for knob in knobs()}
    assert Config.load({name: str(value) for name, value in given.items() if value is not None}) == config


@given(configs)
def test_every_configuration_survives_the_way_through_arguments(config):
    assert Config.load({}, **dataclasses.asdict(config)) == config


# Text


@given(knobs_and_values, st.text(" \t\n", max_size=3), st.text(" \t\n", max_size=3))
def test_space_around_a_value_means_nothing(pair, before, after):
    knob, value = pair
    text = "" if value is None else str(value)
    assert knob.parse(f"{before}{text}{after}", source="") == value


def refusal(knob: Knob, text: str) -> str:
    """Says why a text is refused; empty when it is legal."""
    try:
        knob.check(knob.parse(text, source="SOURCE"), source="PARSED")
    except ConfigError as error:
        return str(error)
    return ""


@given(st.sampled_from(knobs()), st.text())
def test_any_text_is_either_legal_or_refused_with_its_source(knob, text):
    if said := refusal(knob, text):
        assert said.startswith("SOURCE=")
        assert said.endswith(f" is not usable: give {knob.legal}")


@given(st.sampled_from([knob for knob in knobs() if knob.kind is float]), st.floats())
def test_a_number_is_legal_exactly_in_its_range(knob, number):
    assert (refusal(knob, repr(number)) == "") == (knob.low <= number <= knob.high)


@pytest.mark.parametrize(("text", "value"), [("1", True), ("True", True), ("YES", True), ("off", False), ("0", False)])
def test_a_switch_has_many_words(text, value):
    assert load(COORDD_STALL_CHECK=text).stall_check is value


def test_a_choice_is_read_in_any_case():
    assert load(COORDD_LOG_LEVEL="DEBUG").log_level == "debug"


def test_an_optional_knob_may_be_empty():
    assert KNOBS["stall_seconds"].parse(" ", source="--stall-seconds") is None


@pytest.mark.parametrize("text", ["many", "1.5", "1e3", "-1", "0x10", "9" * 5000], ids=lambda text: text[:6])
def test_what_is_no_whole_number_is_refused(text):
    with pytest.raises(ConfigError, match=r"^COORDD_CACHE_CAPACITY=.* give a whole number from 0 to 1048576$"):
        load(COORDD_CACHE_CAPACITY=text)


# Horovod's variables


@pytest.mark.parametrize(
    ("variable", "text", "name", "value"),
    [
        ("HOROVOD_FUSION_THRESHOLD", "134217728", "fusion_mb", 128),
        ("HOROVOD_FUSION_THRESHOLD", "1", "fusion_mb", 2**-20),
        ("HOROVOD_FUSION_THRESHOLD", "0", "fusion_mb", 0),
        ("HOROVOD_CYCLE_TIME", "2.5", "cycle_ms", 2.5),
        ("HOROVOD_CACHE_CAPACITY", "0", "cache_capacity", 0),
        ("HOROVOD_STALL_CHECK_DISABLE", "1", "stall_check", False),
        ("HOROVOD_STALL_CHECK_DISABLE", "0", "stall_check", True),
        ("HOROVOD_STALL_CHECK_TIME_SECONDS", "60", "stall_seconds", 60),
        ("HOROVOD_STALL_CHECK_TIME_SECONDS", "0", "stall_seconds", None),
        ("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "120", "stall_abort_seconds", 120),
        ("HOROVOD_START_TIMEOUT", "30", "start_seconds", 30),
        ("HOROVOD_THREAD_AFFINITY", "2,3", "daemon_cores", "2,3"),
        ("HOROVOD_GLOO_IFACE", "eth0", "interface", "eth0"),
        ("HOROVOD_LOG_LEVEL", "INFO", "log_level", "info"),
        ("HOROVOD_LOG_LEVEL", "trace", "log_level", "debug"),
        ("HOROVOD_LOG_LEVEL", "fatal", "log_level", "error"),
    ],
)
def test_horovods_variables_are_read_in_horovods_units(variable, text, name, value):
    assert getattr(Config.load({variable: text}), name) == value


@pytest.mark.parametrize("knob", ALIASED, ids=lambda knob: knob.alias)
def test_nonsense_in_horovods_variables_is_refused_in_their_name(knob):
    with pytest.raises(ConfigError) as error:
        Config.load({knob.alias: "more than plenty"})
    message = f"{knob.alias}='more than plenty' is not usable: give what {knob.variable} can hold, {knob.legal}"
    assert str(error.value) == message


def test_a_value_out_of_range_is_shown_as_it_was_given():
    with pytest.raises(ConfigError, match=r"^HOROVOD_FUSION_THRESHOLD='-5' is not usable: give what COORDD_FUSION_MB"):
        load(HOROVOD_FUSION_THRESHOLD="-5")


def test_reading_horovods_variables_is_told_in_one_line():
    environment = {"HOROVOD_CYCLE_TIME": "2", "HOROVOD_FUSION_THRESHOLD": "0", "HOROVOD_LOG_LEVEL": " "}
    told = "read: HOROVOD_FUSION_THRESHOLD as COORDD_FUSION_MB, HOROVOD_CYCLE_TIME as COORDD_CYCLE_MS"
    assert aliased(environment) == told
    assert aliased({"HOROVOD_CYCLE_TIME": "2", "COORDD_CYCLE_MS": "3"}) == ""


def test_horovods_log_levels_are_understood_in_our_own_variable_too():
    assert load(COORDD_LOG_LEVEL="TRACE").log_level == "debug"
