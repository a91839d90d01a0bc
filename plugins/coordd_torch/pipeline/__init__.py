"""The pipeline engine's PyTorch side."""
