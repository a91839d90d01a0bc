"""Tests of what `coordd status` finds and shows."""
