"""The engine loop and its fronts, synchronous and asynchronous."""
