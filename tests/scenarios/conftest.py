"""``pytest tests/scenarios --rewrite`` writes the transcripts anew; read the difference before you keep it."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite", action="store_true", help="write what the scenarios show into their files")
