"""Training a model that is cut into stages: plans, their simulation, the split, and what carries a plan out."""
