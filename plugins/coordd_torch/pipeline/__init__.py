"""PyTorch models in a pipeline: how they are cut, built, run and saved."""
