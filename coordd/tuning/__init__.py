"""What autotune needs of the outside world: an optimiser, a record of what was tried, and pictures of it."""
