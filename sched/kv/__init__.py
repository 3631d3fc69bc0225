"""KV memory accounting: counts of blocks, no tensors."""

from .cache import KVCache
from .contiguous import Contiguous
from .grouped import Grouped
from .leases import Lease
from .paged import Paged
from .prefix import Prefix
from .tables import BlockTables
from .tiers import Tiers

__all__ = ["BlockTables", "Contiguous", "Grouped", "KVCache", "Lease", "Paged", "Prefix", "Tiers"]
