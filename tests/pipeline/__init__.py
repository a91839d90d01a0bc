"""Tests of `coordd.pipeline`."""
