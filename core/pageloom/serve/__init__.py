"""The OpenAI-compatible server. The engine steps in a process of its own beside it."""
