"""The client of any OpenAI-compatible server: what it sends, when, and what it makes of what comes back."""
