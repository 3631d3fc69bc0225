"""The real engine: any Hugging Face decoder behind the attention interface, driven by the same scheduler as the simulation."""
