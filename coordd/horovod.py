"""Horovod's environment variables that have no effect here, each with the reason. Pure.

Variables with an effect are aliases of settings, see `coordd.config`. Job scripts still set the others, so each causes
one message, instead of being ignored silently.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable

__all__ = ["MEANINGLESS", "unread"]

PREFIX = "HOROVOD_"

_LAYOUT = "ranks of one host always reduce together first, and hosts then exchange the rest"
_SEARCH = "autotune ends by itself; COORDD_AUTOTUNE_SHARE and COORDD_AUTOTUNE_STEPS bound it"
_BY_MPI = "ranks are started and connected by MPI"
_HOST = "tensors of a GPU travel by way of the host"
_SAME_RANKS = "the ranks of a job stay the same; save checkpoints, and start it anew when it has failed"

MEANINGLESS = {
    "ADASUM_MPI_CHUNK_SIZE": "COORDD_CHUNK_KB says in which pieces large tensors travel",
    "AUTOTUNE_BAYES_OPT_MAX_SAMPLES": _SEARCH,
    "AUTOTUNE_GAUSSIAN_PROCESS_NOISE": _SEARCH,
    "AUTOTUNE_STEPS_PER_SAMPLE": _SEARCH,
    "AUTOTUNE_WARMUP_SAMPLES": _SEARCH,
    "BATCH_D2D_MEMCOPIES": _HOST,
    "CCL_BGT_AFFINITY": "COORDD_DAEMON_CORES says where the daemon runs",
    "CCL_CACHE": "there is no oneCCL in coordd",
    "CONTROLLER": _BY_MPI,
    "CPU_OPERATIONS": "data travels over MPI, and through common memory within a host; see COORDD_TRANSPORT",
    "DISABLE_GROUP_FUSION": "results do not depend on what is fused with what",
    "DISABLE_NVTX_RANGES": "there are no NVTX ranges",
    "DYNAMIC_PROCESS_SETS": "process sets need no announcement, any may be used at any time",
    "ELASTIC": _SAME_RANKS,
    "ELASTIC_TIMEOUT": _SAME_RANKS,
    "ENABLE_ASYNC_COMPLETION": _HOST,
    "ENABLE_XLA_OPS": "XLA cannot call the daemon: leave jit_compile off",
    "GLOO_RENDEZVOUS_ADDR": _BY_MPI,
    "GLOO_RENDEZVOUS_PORT": _BY_MPI,
    "GLOO_TIMEOUT_SECONDS": "COORDD_START_SECONDS and COORDD_HEARTBEAT_SECONDS say how long ranks wait for each other",
    "HIERARCHICAL_ALLGATHER": _LAYOUT,
    "HIERARCHICAL_ALLREDUCE": _LAYOUT,
    "LOG_HIDE_TIME": "log lines have no time, unless the script's logging adds it",
    "LOG_TIMESTAMP": "log lines have no time, unless the script's logging adds it",
    "MPI_THREADS_DISABLE": "only one thread calls MPI, so its level is up to you",
    "NUM_NCCL_STREAMS": _HOST,
    "SECRET_KEY": "the control channel makes a key of its own for each job",
    "TORUS_ALLREDUCE": _LAYOUT,
}
"""Reasons, by the name without its prefix."""

_PLACES = {"RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "HOSTNAME"}
"""Variables that launchers set for scripts to read."""

_OF_THE_BUILD = (
    *("WITH", "GPU", "CUDA_", "ROCM_", "NCCL_", "CCL_HOME", "MPI_HOME", "DDL_", "ALLOW_MIXED_GPU", "SKIP_", "CMAKE"),
    *("ALLREDUCE_TYPE", "BUILD_", "DEBUG", "JOBS", "MPICXX_SHOW"),
)
"""Prefixes of variables that configure Horovod's build; images that contain Horovod set them permanently."""


def unread(names: Iterable[str], aliases: Collection[str]) -> tuple[str, ...]:
    """Returns one sentence for each Horovod variable that is not read, with the reason or the probable intention.

    Args:
        names: the variables that are set.
        aliases: the variables that are read, with their prefix.
    """
    sentences = []
    for name in sorted(name for name in names if name.startswith(PREFIX) and name not in aliases):
        short = name.removeprefix(PREFIX)
        if short in MEANINGLESS:
            sentences.append(f"{name} has no effect: {MEANINGLESS[short]}")
        elif short not in _PLACES and not short.startswith(_OF_THE_BUILD):
            near = difflib.get_close_matches(name, aliases, n=1)
            hint = f"did you mean {near[0]}?" if near else "docs/knobs.md lists those that are read"
            sentences.append(f"{name} is not read by coordd and has no effect; {hint}")
    return tuple(sentences)
