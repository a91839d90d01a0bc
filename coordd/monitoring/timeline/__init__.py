"""The timeline: what each rank records of its operations and waits, and what all ranks' records tell together."""
