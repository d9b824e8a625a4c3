"""From a model's name to a validated model that is ready to decode."""
