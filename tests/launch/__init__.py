"""Tests of `coordd run` and `coordd doctor`; the scripts that they start know nothing of the daemon."""
