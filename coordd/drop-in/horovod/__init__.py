"""Horovod's import paths, over coordd.

This folder's parent is on the path of the ranks of `coordd run --as-horovod`, and of whoever puts it there; else nobody
can import it. Its one rule: it does nothing that coordd does not do. Names are passed on, or say why they are refused.
"""

from horovod.runner import run

__all__ = ["__version__", "run"]

__version__ = "0.28.1"
"""The release of Horovod whose interface this is."""
