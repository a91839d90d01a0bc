"""Runs the command line for ``python -m coordd_tools.bench``."""

from coordd_tools.bench.cli import main

raise SystemExit(main())
