"""One forward step: batch, attention, the model's layers, sampling."""
