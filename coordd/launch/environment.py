"""The environment variables that are forwarded to ranks on other hosts.

One rule: an allow-list. Ranks on this host inherit the whole environment, as any child process does; ranks on other
hosts get only the variables that training needs, so tokens and passwords stay on this host. ``--env`` adds variables.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from coordd.config import LAUNCHED
from coordd.errors import ConfigError

__all__ = ["assignments", "forwarded"]

_NAMES = frozenset(
    (
        *("PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "TMPDIR"),
        *("LANG", "TZ", "TERM", "COLORTERM", "COLUMNS", "NO_COLOR", "FORCE_COLOR"),
    )
)
_PREFIXES = (
    *("COORDD_", "HOROVOD_", "PYTHON", "LC_"),
    *("OMP_", "MKL_", "KMP_", "OPENBLAS_", "CUDA_", "ROCR_", "HIP_", "UCX_", "FI_", "NCCL_", "GLOO_"),
    *("TORCH", "PYTORCH_", "KERAS_", "XLA_"),
    *("TF_CPP_", "TF_ENABLE_", "TF_FORCE_", "TF_GPU_", "TF_NUM_", "TF_XLA_"),  # not TF_TOKEN_, which is Terraform's
)
_NEVER = frozenset({LAUNCHED})
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def forwarded(environment: Mapping[str, str], extra: Iterable[str] = ()) -> tuple[str, ...]:
    """Returns the names of the variables to forward, sorted."""
    listed = {name for name in environment if name in _NAMES or name.startswith(_PREFIXES)}
    return tuple(sorted(listed - _NEVER | set(extra)))


def assignments(words: Iterable[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Parses the values of ``--env``: ``NAME`` or ``NAME=VALUE``.

    Raises:
        ConfigError: a value has another form, or names a variable that is not set.
    """
    found = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not _NAME.fullmatch(name):
            raise ConfigError.illegal("--env", word, "the name of a variable, or NAME=VALUE")
        if not equals and name not in environment:
            raise ConfigError.illegal("--env", word, "a variable that is set, or NAME=VALUE")
        found[name] = value if equals else environment[name]
    return found
