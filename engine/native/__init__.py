"""The real engine: any Hugging Face decoder behind the attention interface, driven by the same scheduler as the simulation."""

from .workers import spin_briefly

spin_briefly()  # before torch is imported
