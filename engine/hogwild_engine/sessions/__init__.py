"""One request from its prompt to its answer, as a sequence of phases."""
