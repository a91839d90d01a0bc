"""The reduction of gradients: buckets, grouping, readiness and checks between ranks."""
