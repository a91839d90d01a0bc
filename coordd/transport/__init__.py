"""The data plane: tensors between ranks, by point-to-point messages and what is built from them."""
