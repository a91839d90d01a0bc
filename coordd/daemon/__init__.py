"""The background thread of a rank, its message queue, and what framework threads ask of it."""
