"""Pipelines of PyTorch models: what a model is made of, and its stages."""
