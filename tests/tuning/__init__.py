"""Tests of what autotune keeps and shows."""
