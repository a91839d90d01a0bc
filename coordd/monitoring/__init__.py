"""What a running job shows: timeline, status, stacks and counters."""
