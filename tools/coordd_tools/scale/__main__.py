"""Lets ``python -m coordd_tools.scale`` start the command line."""

from coordd_tools.scale.cli import main

raise SystemExit(main())
