"""The host that a rank runs on: cores, neighbours, processes, and what a launcher has said in the environment."""
