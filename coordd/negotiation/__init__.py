"""The protocol by which ranks agree on what to execute and in which order. Pure: no I/O, clock or thread."""
