"""What the ranks do; one module for each task."""
