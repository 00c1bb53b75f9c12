"""Formats of the KV cache: eight and four bits, with constant scales or one for each vector."""
