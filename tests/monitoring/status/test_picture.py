from __future__ import annotations

import io

import msgspec
from rich.console import Console

from coordd.monitoring.status.picture import picture
from coordd.monitoring.status.probe_result import Life
from coordd.monitoring.status.report import Plan, Stack
from tests.monitoring.status.made import MAIN, WAITING, operation, seen, standing, survey

STALLED = survey(
    standing(0, operation("w"), waits=True, size=3),
    standing(1, operation("w"), waits=True, size=3, plan=Plan(9, lock=9, steps=5, buckets=1, tensors=1)),
    seen(2, host="node1", pid=102, life=Life.STOPPED),
)
SHOWN = """\
python train.py
3 ranks · 20.0 s · job job7 · coordd 1.2

Ranks 0-1 have waited for rank 2 for 2.5 s.
Rank 2: stopped; `kill -CONT 102` on node1 lets it go on.

rank  host   pid  state                                                             last submitted
   0  node1  100  waits for 'w' (allreduce) for 2.5 s: rank 2 has not submitted it  'w' at train.py:31, 2.5 s ago
   1  node1  101  waits for 'w' (allreduce) for 2.5 s: rank 2 has not submitted it  'w' at train.py:31, 2.5 s ago
   2  node1  102  stopped

ranks  plan                                     cache      operations      moved               a second  common memory
0      negotiating; plan 12 was the last        75% of 40  40, 75% locked  allreduce 40.0 MiB  2.0 MiB   1.0 MiB
1      locked since plan 9: 1 tensor in 1                  40, 75% locked  allreduce 40.0 MiB  2.0 MiB   1.0 MiB
       bucket, 5 steps

ranks 0-1, main thread, in coordd_torch.optimizer.synchronize()
  train.py:9 in <module>: main()
  train.py:31 in main: loss.backward()
"""


def drawn(*arguments, width=118, **options):
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(picture(*arguments, **options))
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines()) + "\n"


def test_a_stall_is_drawn_so():
    assert drawn(STALLED) == SHOWN


def test_what_ranks_have_in_common_is_said_once():
    shown = drawn(survey(standing(0), standing(1)))
    assert "\n0-1    negotiating" in shown
    assert "ranks 0-1, main thread\n" in shown


def test_threads_that_wait_for_work_are_shown_if_asked_for():
    idle = Stack("tqdm", ("/usr/lib/python3.11/threading.py:331 in wait: waiter.acquire()",))
    loader = Stack("loader", ("data.py:3 in load: read()",))
    told = survey(standing(0, stacks=(MAIN, idle, loader)))
    assert "rank 0, loader\n  data.py:3 in load: read()" in drawn(told)
    assert "tqdm" not in drawn(told)
    assert "rank 0, tqdm" in drawn(told, every_thread=True)


def test_a_thread_that_waits_in_coordd_matters_wherever_python_waits():
    waits = Stack("trainer", ("/usr/lib/python3.11/threading.py:331 in wait: x",), "coordd.ops.handles.result")
    assert "rank 0, trainer, in coordd.ops.handles.result()" in drawn(survey(standing(0, stacks=(MAIN, waits))))


def test_the_end_of_a_deep_stack_is_shown():
    deep = Stack("MainThread", tuple(f"deep.py:{line} in f: f()" for line in range(40)))
    shown = drawn(survey(standing(0, stacks=(deep,))))
    assert "  … 28 more\n  deep.py:28 in f: f()" in shown
    assert "deep.py:27 " not in shown


def test_speed_between_two_looks_takes_the_place_of_the_average():
    assert "3.0 KiB" in drawn(survey(standing(0)), {0: 3 << 10})
    assert "0 B" in drawn(survey(standing(0)), {})


def test_ranks_that_come_late_are_shown_with_how_much():
    shown = drawn(survey(standing(0, lead=0.5), standing(1, lead=0.1)))
    assert "behind  last submitted" in shown
    assert [line.split()[4] for line in shown.splitlines() if line.startswith(("   0", "   1"))] == ["'w'", "400.0"]
    assert "behind" not in drawn(survey(standing(0, lead=0.5), standing(1, lead=0.49999)))


def test_what_looks_like_markup_is_shown_as_it_is():
    odd = operation("[red]w[/]")
    shown = drawn(survey(standing(0, odd, waits=True, stacks=(WAITING,)), standing(1)))
    assert "'[red]w[/]'" in shown


def test_ranks_that_were_not_asked_are_counted():
    told = msgspec.structs.replace(survey(standing(0)), unasked=9744)
    assert "9,744 ranks of other hosts were not asked" in drawn(told)
