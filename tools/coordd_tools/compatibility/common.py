"""The names that Horovod has for every framework, with the signatures of 0.28; data only."""

from __future__ import annotations

from coordd_tools.compatibility.name import Name, Part

__all__ = ["COMMON"]

COMMON = Part(
    "Common to all",
    ("horovod.torch", "horovod.tensorflow", "horovod.tensorflow.keras", "horovod.keras"),
    {
        "Life cycle": (
            Name(
                "init",
                "comm=None, process_sets=None",
                "a fork, a second launcher or ranks that do not come are explained",
            ),
            Name("shutdown", "", "waits until all ranks leave in step"),
            Name("is_initialized", ""),
            Name("start_timeline", "file_path, mark_cycles=False", "of all ranks, clocks aligned"),
            Name("stop_timeline", ""),
        ),
        "Ranks": (
            Name("rank", ""),
            Name("size", ""),
            Name("local_rank", ""),
            Name("local_size", ""),
            Name("cross_rank", ""),
            Name("cross_size", ""),
            Name("is_homogeneous", ""),
        ),
        "Build": (
            Name("mpi_threads_supported", "", note="whether the script may call mpi4py, too"),
            Name("mpi_enabled", ""),
            Name("mpi_built", "verbose=False", note="whether mpi4py is installed"),
            Name("gloo_enabled", "", note="no"),
            Name("gloo_built", "verbose=False", note="no"),
            Name("nccl_built", "verbose=False", note="0"),
            Name("ddl_built", "verbose=False", note="no"),
            Name("ccl_built", "verbose=False", note="no"),
            Name("cuda_built", "verbose=False", note="no"),
            Name("rocm_built", "verbose=False", note="no"),
        ),
        "Reductions": (
            Name("Average"),
            Name("Sum"),
            Name("Adasum", None, "any number of ranks, any process set"),
            Name("Min"),
            Name("Max"),
            Name("Product"),
        ),
        "Process sets": (
            Name("global_process_set"),
            Name("ProcessSet", "ranks_or_comm", "a value: equal members make an equal set, usable without being added"),
            Name("ProcessSet.ranks", note="ascending; none for all ranks"),
            Name("ProcessSet.process_set_id", note="a text made of the members, in place of a number"),
            Name(
                "ProcessSet.mpi_comm",
                refused="a set is made of ranks; mpi4py's `COMM_WORLD.Create_group` makes a communicator",
            ),
            Name("ProcessSet.size", ""),
            Name("ProcessSet.rank", ""),
            Name("ProcessSet.included", ""),
            Name("add_process_set", "process_set"),
            Name("remove_process_set", "process_set"),
        ),
        "Errors": (
            Name("HorovodInternalError", None, "every error of coordd's is one, and says who, what and where"),
            Name("HostsUpdatedInterrupt", "skip_sync=False"),
            Name("HorovodVersionMismatchError", "name, version, installed_version"),
        ),
    },
)
