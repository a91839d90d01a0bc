"""Starts and ends ranks: `coordd run` and `coordd doctor`.

```
 coordd run ──▶ job ──▶ mpirun / mpiexec / srun ──▶ rank (one small process per rank) ──▶ the user's command
                 ▲                                    │
                 └────── frames on standard error ◀───┘   output lines, "started", "ended"
```

One rule: the component that starts a process also ends it, and ends no other process. This file imports nothing,
because the process of every rank loads it.
"""
