"""Heads of a fine-tuned encoder: what it is taught to say about a length, each with its loss."""
