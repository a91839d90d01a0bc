from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordd.errors import ConfigError
from coordd.launch.hosts import Host, place_ranks, read_hostfile, read_hosts

NAMES = st.from_regex(r"[a-z0-9]([a-z0-9.-]{0,20}[a-z0-9])?", fullmatch=True)
HOSTS = st.lists(st.builds(Host, NAMES, st.integers(1, 999)), min_size=1, max_size=8, unique_by=lambda host: host.name)


@given(HOSTS)
def test_hosts_read_back_what_was_written(hosts):
    assert read_hosts(",".join(map(str, hosts))) == tuple(hosts)


@given(hosts=HOSTS, colon=st.booleans())
def test_both_kinds_of_hostfile_say_the_same(tmp_path_factory, hosts, colon):
    lines = [str(host) if colon else f"{host.name}  slots={host.slots}  # {host}" for host in hosts]
    path = tmp_path_factory.mktemp("hosts") / "hostfile"
    path.write_text("# all of them\n\n" + "\n".join(lines), "utf-8")
    assert read_hostfile(path) == tuple(hosts)


@given(st.text(max_size=30))
def test_only_what_looks_like_a_host_gets_through(text):
    try:
        hosts = read_hosts(text)
    except ConfigError:
        return
    for host in hosts:
        assert host.name[0].isalnum()
        assert set(host.name) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")
        assert host.slots >= 1


@pytest.mark.parametrize(
    "text", ["", ",", "a:", "a:0", "a:-1", "a:x", "-oProxyCommand=x", "a b", "a;b", "$(x)", "a:1:2", "a:٣", ".a"]
)
def test_what_is_no_host_is_refused_by_name(text):
    with pytest.raises(ConfigError, match=r"^--hosts=.* is not usable: give host or host:slots"):
        read_hosts(text)


def test_a_host_named_twice_takes_the_sum():
    assert read_hosts("a:2,b,a:3") == (Host("a", 5), Host("b", 1))


@pytest.mark.parametrize(("size", "expected"), [(1, "a:1"), (2, "a:2"), (3, "a:2,b:1"), (6, "a:2,b:3,c:1")])
def test_ranks_fill_the_hosts_in_order(size, expected):
    assert place_ranks(size, read_hosts("a:2,b:3,c:9")) == read_hosts(expected)


def test_too_few_slots_are_refused():
    with pytest.raises(ConfigError, match="-n=6 is not usable: give at most 5, or more slots than in a:2,b:3"):
        place_ranks(6, read_hosts("a:2,b:3"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a slots=4\n-x slots=1", r"hostfile:2='-x:1' is not usable"),
        ("a four", r"hostfile:1='a four' is not usable: give one host a line"),
        ("# nothing", "a file that names at least one host"),
    ],
)
def test_a_bad_hostfile_is_named_with_its_line(tmp_path, text, message):
    path = tmp_path / "hostfile"
    path.write_text(text, "utf-8")
    with pytest.raises(ConfigError, match=message):
        read_hostfile(path)


def test_a_missing_hostfile_is_a_matter_of_configuration(tmp_path):
    with pytest.raises(ConfigError, match="a readable text file"):
        read_hostfile(tmp_path / "none")
