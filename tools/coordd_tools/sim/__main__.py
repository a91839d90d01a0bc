"""Lets ``python -m coordd_tools.sim`` start the command line."""

from coordd_tools.sim.cli import main

raise SystemExit(main())
