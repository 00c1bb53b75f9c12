"""Engines without a model, in virtual time: how long steps take, and what policies make of it."""
