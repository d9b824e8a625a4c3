"""What callers set and get: configuration, requests, events, errors. Imports no torch."""
