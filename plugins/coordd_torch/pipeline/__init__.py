"""Pipelines of PyTorch models: how a model is cut into stages, built in parts, run, and saved."""
