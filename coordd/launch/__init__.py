"""Starting ranks and ending them: `coordd run` and `coordd doctor`.

```
 coordd run ──▶ job ──▶ mpirun / mpiexec / srun ──▶ rank (one small process per rank) ──▶ the user's command
                 ▲                                    │
                 └────── frames on standard error ◀───┘   output lines, "started", "ended"
```

One rule: what starts a process also ends it, and ends nothing else. This file imports nothing, because the process of
every rank passes through it.
"""
