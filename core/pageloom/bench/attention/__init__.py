"""Attention backends compared, case by case, on random keys and values: no model, no engine."""
