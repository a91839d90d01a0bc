"""Memory that the ranks of one host share, and what they write there for each other."""
