"""Measurements: engines compared (`serving`), and KV memory without a model (`memory`)."""
