"""Lets ``python -m coordd_tools.bench`` start the command line."""

from coordd_tools.bench.cli import main

raise SystemExit(main())
