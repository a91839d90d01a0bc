"""Every setting, once.

A setting's environment variable (``COORDD_FUSION_MB``), its Horovod alias, its command-line flag (``--fusion-mb``) and
its row in ``docs/knobs.md`` all derive from the one field below. An argument overrides the environment, which overrides
the default.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, get_type_hints

from coordd import horovod
from coordd.errors import ConfigError

__all__ = ["LAUNCHED", "MIB", "Config", "Knob", "aliased", "knobs", "timeline_folder", "unread"]

LAUNCHED = "COORDD_LAUNCHED"  # set by `coordd run` for its ranks; not a setting

_PREFIX = "COORDD_"
MIB = 1 << 20
_SWITCH = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
_HOROVOD_LEVELS = {"trace": "debug", "fatal": "error"}


def _from_bytes(text: str) -> str:
    """Converts Horovod's byte count to MiB."""
    return repr(float(text) / MIB)


def _inverted(text: str) -> str:
    """Converts Horovod's ``…_DISABLE`` to a positive switch."""
    return "0" if _switch(text) else "1"


def _adaptive_if_zero(text: str) -> str:
    """Keeps Horovod's number of seconds; empty for 0, as there is no zero-second stall limit."""
    return "" if float(text) <= 0 else text


def _nearest_level(text: str) -> str:
    """Maps a log level of Horovod's, which has two more, to the nearest level here."""
    return _HOROVOD_LEVELS.get(text.lower(), text)


def timeline_folder(text: str) -> str:
    """Returns the folder for Horovod's timeline file; empty for ``DYNAMIC``, which is always possible here."""
    return "" if text.upper() == "DYNAMIC" else text.removesuffix(".json")


def _switch(word: str) -> bool:
    if word.lower() in _SWITCH:
        return _SWITCH[word.lower()]
    raise ValueError(word)


def _knob(  # noqa: PLR0913 - one row of the table of settings
    default: Any,
    about: str,
    *,
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] = (),
    alias: str = "",
    convert: Callable[[str], str] = str,
) -> Any:
    metadata = {"about": about, "low": low, "high": high, "choices": choices, "alias": alias, "convert": convert}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class Config:
    """All settings of one daemon.

    Raises:
        ConfigError: a value has the wrong type or lies outside its range; the message names the legal range.
    """

    fusion_mb: float = _knob(
        32.0,
        "largest fusion bucket in MiB; 0 reduces every tensor on its own",
        low=0,
        high=65536,
        alias="HOROVOD_FUSION_THRESHOLD",
        convert=_from_bytes,
    )
    batch_mb: float = _knob(
        8.0,
        "MiB of ready tensors that end the batching window early, so that the network is never idle",
        low=0,
        high=65536,
    )
    overlap: bool = _knob(
        True, "reduce gradients while backward computes; no: all at once when it ends, for chips that cannot do both"
    )
    cycle_ms: float = _knob(
        20.0,
        "batching window in milliseconds: how long ready tensors wait for company while nobody waits for them",
        low=0,
        high=10_000,
        alias="HOROVOD_CYCLE_TIME",
    )
    cache_capacity: int = _knob(
        4096,
        "known tensors that are negotiated as single bits; 0 turns the response cache off",
        low=0,
        high=1 << 20,
        alias="HOROVOD_CACHE_CAPACITY",
    )
    lock_steps: int = _knob(
        3,
        "equal steps, two at least, after which buckets start without negotiation until a step differs; 0: never",
        low=0,
        high=1 << 20,
    )
    chunk_kb: int = _knob(
        1024, "piece in KiB in which large tensors travel; several are in flight at once", low=4, high=262_144
    )
    check: str = _knob(
        "shape",
        "what must be equal on all ranks in a reduction or broadcast beside the type: shape, or number of elements",
        choices=("shape", "numel"),
    )
    check_in_flight: bool = _knob(
        False, "find tensors that are changed while they are in flight, by a checksum each; for debugging"
    )
    check_parameters: bool = _knob(
        True,
        "compare the ranks' parameters and hyperparameters when an optimizer begins, and now and then later: an error "
        "if they differ, under --as-horovod a warning",
    )
    nonfinite: str = _knob(
        "ignore",
        "gradients with an infinity or NaN: ignore them, warn and name rank and parameter, skip the step on all ranks, "
        "or raise",
        choices=("ignore", "warn", "skip", "raise"),
    )
    stall_check: bool = _knob(
        True, "report tensors that wait for other ranks", alias="HOROVOD_STALL_CHECK_DISABLE", convert=_inverted
    )
    stall_seconds: float | None = _knob(
        None,
        "seconds after which a waiting tensor is reported; empty: 20 times the usual wait, between 5 and 60",
        low=0.05,
        high=86_400,
        alias="HOROVOD_STALL_CHECK_TIME_SECONDS",
        convert=_adaptive_if_zero,
    )
    stall_abort_seconds: float = _knob(
        0.0,
        "seconds after which a waiting tensor ends the job; 0: never",
        low=0,
        high=86_400,
        alias="HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
    )
    heartbeat_seconds: float = _knob(
        60.0, "silence on the control channel after which a rank counts as dead; 0: never", low=0, high=3600
    )
    start_seconds: float = _knob(
        60.0, "how long init() waits for all ranks", low=0.1, high=86_400, alias="HOROVOD_START_TIMEOUT"
    )
    alone: bool = _knob(
        False, "be a world of one, though the environment tells of more processes: each then is rank 0 of 1"
    )
    transport: str = _knob("auto", "data plane: auto picks mpi under an MPI launcher, else local")
    shared_memory: bool = _knob(
        True, "ranks of one host reduce in each other's memory and lend it for messages, without the data plane"
    )
    simulate_hosts: int = _knob(
        0,
        "split one machine's ranks into so many hosts, to try what several hosts do; 0: do not",
        low=0,
        high=4096,
    )
    fan_in: int = _knob(
        16,
        "ranks of its host, and other hosts, that report to a rank; one host, or no more ranks than this, need no tree",
        low=2,
        high=65536,
    )
    interface: str = _knob(
        "",
        "address or interface on which rank 0 listens; empty: a private socket on one host, else the first outward one",
        alias="HOROVOD_GLOO_IFACE",
    )
    daemon_cores: str = _knob(
        "",
        "processors on which the daemon's thread runs, as the kernel numbers them, such as 3 or 6-7; empty: those that "
        "`coordd run` finds spare, else any",
        alias="HOROVOD_THREAD_AFFINITY",
    )
    as_horovod: bool = _knob(
        False,
        "do what Horovod does where coordd would refuse or do otherwise, see docs/migrating-from-horovod.md; the flag "
        "of `coordd run` also lets an unchanged script import horovod, and understands horovodrun's flags",
    )
    autotune: bool = _knob(
        False, "search for faster settings while training, and keep them for the next run", alias="HOROVOD_AUTOTUNE"
    )
    autotune_log: str = _knob(
        "",
        "file that records what autotune tried and found; empty: one for each model in the user's cache",
        alias="HOROVOD_AUTOTUNE_LOG",
    )
    autotune_share: float = _knob(0.01, "largest share of the training steps that trials take", low=0, high=1)
    autotune_steps: int = _knob(
        0,
        "training steps after which autotune begins no more trials; 0: when there is nothing to gain",
        low=0,
        high=1 << 40,
    )
    timeline: str = _knob(
        "",
        "folder in which every rank records its operations and waits, for `coordd timeline`; empty: none is recorded",
        alias="HOROVOD_TIMELINE",
        convert=timeline_folder,
    )
    timeline_mark_cycles: bool = _knob(
        False, "record the daemon's cycles in the timeline, too", alias="HOROVOD_TIMELINE_MARK_CYCLES"
    )
    log_level: str = _knob(
        "warning",
        "least severe message that is printed",
        choices=("debug", "info", "warning", "error"),
        alias="HOROVOD_LOG_LEVEL",
        convert=_nearest_level,
    )

    def __post_init__(self) -> None:
        for knob in knobs():
            knob.check(getattr(self, knob.name), source=knob.name)

    @property
    def digest(self) -> str:
        """The settings that must be equal on all ranks, if not at their defaults, as readable text."""
        own = {"log_level", "interface", "daemon_cores", "timeline", "timeline_mark_cycles"}
        found = {knob.name: getattr(self, knob.name) for knob in knobs() if knob.name not in own}
        defaults = Config()
        changed = [f"{name}={value}" for name, value in found.items() if value != getattr(defaults, name)]
        return ", ".join(changed) or "the defaults"

    @classmethod
    def load(cls, environment: Mapping[str, str], **arguments: Any) -> Config:
        """Builds the configuration from arguments, then environment, then defaults.

        Args:
            environment: usually ``os.environ``; an empty variable counts as not set.
            arguments: fields by name; ``None`` counts as not given.

        Raises:
            ConfigError: an unknown argument, or a value that cannot be parsed or is out of range.
        """
        known = {knob.name: knob for knob in knobs()}
        if unknown := sorted(set(arguments) - set(known)):
            raise ConfigError.unknown(unknown, sorted(known))
        values = {name: value for name, value in arguments.items() if value is not None}
        for knob in known.values():
            if knob.name not in values and (value := knob.read(environment)) is not None:
                values[knob.name] = value
        return cls(**values)


@dataclass(frozen=True)
class Knob:
    """One setting, with everything that derives from it."""

    name: str
    kind: type
    optional: bool
    default: Any
    about: str
    low: float | None
    high: float | None
    choices: tuple[str, ...]
    alias: str
    convert: Callable[[str], str]

    @property
    def variable(self) -> str:
        """The environment variable, such as ``COORDD_FUSION_MB``."""
        return _PREFIX + self.name.upper()

    @property
    def flag(self) -> str:
        """The command-line flag, such as ``--fusion-mb``."""
        return "--" + self.name.replace("_", "-")

    @property
    def legal(self) -> str:
        """The legal values, in words."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        if self.kind is bool:
            return "one of " + ", ".join(_SWITCH)
        kind = {int: "a whole number", float: "a number", str: "a word"}[self.kind]
        span = f" from {self.low:.9g} to {self.high:.9g}" if self.low is not None and self.high is not None else ""
        return kind + span + (", or empty" if self.optional or self.default == "" else "")

    def read(self, environment: Mapping[str, str]) -> Any:
        """Reads the setting from the environment, under its own name or else Horovod's; ``None`` if not set.

        Raises:
            ConfigError: naming the variable and the legal values.
        """
        if environment.get(self.variable, "").strip():
            return self.parse(environment[self.variable], source=self.variable)
        if word := environment.get(self.alias, "").strip():
            try:
                return self.parse(self.convert(word), source=self.alias)
            except ValueError as error:  # the alias may have another unit; the message gives legal values in ours
                legal = f"what {self.variable} can hold, {self.legal}"
                raise ConfigError.illegal(self.alias, word, legal) from error
        return None

    def parse(self, text: str, *, source: str) -> Any:
        """Parses a value.

        Raises:
            ConfigError: naming ``source`` and the legal values.
        """
        word = text.strip()
        if self.optional and not word:
            return None
        try:
            value = self._value(word)
        except ValueError as error:
            raise ConfigError.illegal(source, text, self.legal) from error
        self.check(value, source=source)
        return value

    def _value(self, word: str) -> Any:
        if self.kind is bool:
            return _switch(word)
        return self.convert(word.lower()) if self.choices else self.kind(word)

    def check(self, value: Any, *, source: str) -> None:
        """Checks type and range.

        Raises:
            ConfigError: naming ``source`` and the legal values.
        """
        if value is None and self.optional:
            return
        accepted = (int, float) if self.kind is float else self.kind
        fits = isinstance(value, accepted) and (self.kind is bool or not isinstance(value, bool))
        if fits and self.low is not None and self.high is not None:
            fits = self.low <= value <= self.high
        if fits and self.kind is str:
            fits = value in self.choices if self.choices else value.split() == [value] or value == self.default == ""
        if not fits:
            raise ConfigError.illegal(source, value, self.legal)


@cache
def knobs() -> tuple[Knob, ...]:
    """Returns all settings in the order of their declaration."""
    hints = get_type_hints(Config)
    found = []
    for row in dataclasses.fields(Config):
        optional = hints[row.name] == float | None
        kind = float if optional else hints[row.name]
        found.append(Knob(name=row.name, kind=kind, optional=optional, default=row.default, **row.metadata))
    return tuple(found)


def unread(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Returns a warning for each variable, coordd's or Horovod's, that looks like a setting but is none."""
    known = {knob.variable for knob in knobs()} | {LAUNCHED}
    sentences = []
    for name in sorted(name for name in environment if name.startswith(_PREFIX) and name not in known):
        near = difflib.get_close_matches(name.removeprefix(_PREFIX), [knob.name.upper() for knob in knobs()], n=1)
        hint = f"did you mean {_PREFIX}{near[0]}?" if near else "`coordd run --help` lists those that there are"
        sentences.append(f"{name} is no setting of coordd and has no effect; {hint}")
    return (*sentences, *horovod.unread(environment, [knob.alias for knob in knobs() if knob.alias]))


def aliased(environment: Mapping[str, str]) -> str:
    """Lists in one line the Horovod variables that are read, and as which settings; "" if there are none."""
    told = [
        f"{knob.alias} as {knob.variable}"
        for knob in knobs()
        if environment.get(knob.alias, "").strip() and not environment.get(knob.variable, "").strip()
    ]
    return f"read: {', '.join(told)}" if told else ""
