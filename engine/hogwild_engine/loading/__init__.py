"""Load a model by name and validate it for decoding over the shared cache."""
