"""Pipelines for Keras: the stage, on TensorFlow and on PyTorch; all else is `coordd.pipeline`."""
