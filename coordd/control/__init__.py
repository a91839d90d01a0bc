"""The control plane: small messages between every rank and the coordinator, apart from the data."""
