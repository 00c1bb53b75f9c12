"""Engines compared on a trace of requests: throughput, latency, KV memory."""
