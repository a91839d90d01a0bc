"""``python -m coordd`` runs the ``coordd`` command where that is not on the path."""

import sys

from coordd.launch.cli import main

if __name__ == "__main__":
    sys.exit(main())
