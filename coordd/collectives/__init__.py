"""From buckets to bytes: operations in flight, and the algorithms that carry them out."""
