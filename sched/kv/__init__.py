"""KV memory accounting: counts of blocks, no tensors."""

from .cache import KVCache
from .contiguous import Contiguous
from .leases import Lease
from .paged import Paged
from .prefix import Prefix
from .tiers import Tiers

__all__ = ["Contiguous", "KVCache", "Lease", "Paged", "Prefix", "Tiers"]
