"""Tests on real MPI ranks.

Two ways in:

* A **case** is a function ``case_*`` without arguments in a file ``cases_*.py``. Every rank of a world calls it, with
  ``cd.init()`` already done, and asserts what it sees. All cases of one world size share one ``mpirun``, and pytest
  shows one item per case and world size. Decorate it with ``@ranks(2, 4)`` for other sizes or another deadline::

      import coordd.torch as cd

      def case_allreduce_adds() -> None:
          assert cd.allreduce(torch.ones(3), op=cd.Sum).tolist() == [cd.size()] * 3

* A test that needs processes of its own (a rank dies, is killed, calls ``init`` twice) calls ``launch``::

      outcome = launch(2, "import sys; sys.exit(3)")
      assert outcome.returncode == 3

Nothing here waits without a limit: what does not end is aborted, after every rank has written the stacks of all its
threads, and no process outlives its job.

``job`` is one launched process tree, ``session`` one ``mpirun`` that runs cases, ``worker`` what runs in its ranks,
``cases`` how they are found, ``specimens`` the cases by which the harness is tested itself.
"""
