"""Pipeline schedules: the order of forward and backward passes on each stage."""
