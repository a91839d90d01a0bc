"""Lets ``python -m coordd_tools.stages`` start the command line."""

from coordd_tools.stages.cli import main

raise SystemExit(main())
