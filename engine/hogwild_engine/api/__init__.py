"""Data that callers pass and receive: configuration, requests, events, errors. No torch."""
