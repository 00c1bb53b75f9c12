"""Observers that come with Pageloom, each a plugin of its own: what an engine does, told to others.

Each does nothing at all, and costs nothing, where the library that it tells is not installed.
"""
