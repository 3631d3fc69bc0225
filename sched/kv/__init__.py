"""KV memory accounting: counts of blocks, no tensors."""

from .cache import KVCache
from .contiguous import Contiguous
from .paged import Paged

__all__ = ["Contiguous", "KVCache", "Paged"]
