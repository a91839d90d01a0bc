"""Cases that fail in known ways, for the test of the harness itself."""
