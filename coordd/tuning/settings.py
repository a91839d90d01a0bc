"""The settings that autotune may change while a job runs, as data: one value per knob, and the possible values.

One rule: values are only chosen here; the code that applies them defines what they mean.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

from coordd.config import MIB
from coordd.errors import ConfigError

__all__ = ["Settings", "Space"]

_FUSION_MB = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)
_CYCLE_MS = (0.0, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0)
_BUCKETS = (1, 2, 4, 8, 16)


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One choice of everything that is tuned; the same on all ranks in any one step.

    Attributes:
        fusion_mb: largest bucket in MiB, as the knob of that name; 0 reduces every tensor on its own.
        cycle_ms: batching window in milliseconds, as the knob of that name.
        buckets: the least number of buckets for a step's gradients, so that the first ones travel while backward still
            computes; 1 leaves it to ``fusion_mb``.
        algorithm: how a bucket is reduced, by a name that the transport knows.
        compression: how a bucket travels, such as ``none`` or ``bf16``.
    """

    fusion_mb: float
    cycle_ms: float
    buckets: int
    algorithm: str
    compression: str

    def bucket_bytes(self, gradients: int) -> int:
        """Returns the largest bucket in bytes, for a step with ``gradients`` bytes of gradients in total."""
        return min(int(self.fusion_mb * MIB), max(1, math.ceil(gradients / self.buckets)))


class Space(msgspec.Struct, frozen=True, kw_only=True):
    """The choices of each knob, ordered so that similar ones are neighbours. A knob with one choice is not tuned.

    Raises:
        ConfigError: a knob has no choice, or one of them twice.
    """

    fusion_mb: tuple[float, ...]
    cycle_ms: tuple[float, ...]
    buckets: tuple[int, ...]
    algorithm: tuple[str, ...]
    compression: tuple[str, ...]

    def __post_init__(self) -> None:
        for knob in Settings.__struct_fields__:
            choices = self.choices(knob)
            if not choices or len(set(choices)) < len(choices):
                raise ConfigError.illegal(knob, choices, "at least one choice, and none of them twice")

    @classmethod
    def around(cls, start: Settings, *, algorithms: Iterable[str] = (), compressions: Iterable[str] = ()) -> Space:
        """Creates the usual space.

        Args:
            start: the settings without tuning; they are always in the space.
            algorithms: the transport's algorithms, if there is a choice.
            compressions: the compressions that the user allows, because they change the numbers; by default only that
                of ``start``.
        """
        return cls(
            fusion_mb=tuple(sorted({*_FUSION_MB, start.fusion_mb})),
            cycle_ms=tuple(sorted({*_CYCLE_MS, start.cycle_ms})),
            buckets=tuple(sorted({*_BUCKETS, start.buckets})),
            algorithm=tuple(dict.fromkeys([start.algorithm, *algorithms])),
            compression=tuple(dict.fromkeys([start.compression, *compressions])),
        )

    def __contains__(self, settings: Settings) -> bool:
        return all(getattr(settings, knob) in self.choices(knob) for knob in Settings.__struct_fields__)

    def choices(self, knob: str) -> tuple[float | str, ...]:
        """Returns the choices of a knob, by its name."""
        found: tuple[float | str, ...] = getattr(self, knob)
        return found

    @property
    def tuned(self) -> tuple[str, ...]:
        """The knobs that have more than one choice."""
        return tuple(knob for knob in Settings.__struct_fields__ if len(self.choices(knob)) > 1)

    @property
    def size(self) -> int:
        """Number of different settings."""
        return math.prod(len(self.choices(knob)) for knob in self.tuned)
