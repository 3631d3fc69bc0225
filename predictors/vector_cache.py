"""A cache of vectors on disk, by the hash of their text: folds and runs share what was computed once.

One SQLite file a model: any number of processes may read and add at once, and a process that dies leaves no half vector. It
holds hashes and vectors, no text.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Vectors = NDArray[np.float32]
Item = TypeVar("Item")

_READ, _WRITTEN = 500, 64  # rows of one query (SQLite takes 999 marks), and of one transaction
_WAIT = 60.0  # s for another process to finish its transaction


def cache_folder() -> Path:
    """LENGTHWISE_CACHE, or `lengthwise` below the user's cache folder. Not made here."""
    root = os.environ.get("LENGTHWISE_CACHE")
    return Path(root) if root else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lengthwise"


class VectorCache:
    """Vectors of `width` float32 numbers in `file`, which is made with its folder when first used."""

    def __init__(self, file: Path, width: int) -> None:
        self.file, self.width = file, width

    def vectors(self, texts: Sequence[str], make: Callable[[str], Vectors]) -> Vectors:
        """(N,) texts -> (N, width): read where known, else made by `make` (text) -> (width,), one after another, and kept.

        Raises ValueError when the file cannot be used.
        """
        keys = [hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest() for text in texts]
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with closing(sqlite3.connect(self.file, timeout=_WAIT)) as database:
                database.execute("PRAGMA synchronous = OFF")  # what a power cut loses is made again
                database.execute("CREATE TABLE IF NOT EXISTS vectors (key BLOB PRIMARY KEY, vector BLOB NOT NULL)")
                known = self._known(database, sorted(set(keys)))
                missing = {key: text for key, text in zip(keys, texts, strict=True) if key not in known}
                for some in _parts(missing.items(), _WRITTEN):
                    made = [(key, np.ascontiguousarray(make(text), dtype=np.float32)) for key, text in some]
                    known.update(made)
                    with database:
                        rows = [(key, vector.tobytes()) for key, vector in made]
                        database.executemany("INSERT OR IGNORE INTO vectors VALUES (?, ?)", rows)
        except (sqlite3.Error, OSError) as error:
            raise ValueError(
                f"the cache {self.file} cannot be used ({error}): delete it, or name another folder in LENGTHWISE_CACHE"
            ) from error
        return np.array([known[key] for key in keys], dtype=np.float32).reshape(len(keys), self.width)

    def _known(self, database: sqlite3.Connection, keys: Sequence[bytes]) -> dict[bytes, Vectors]:
        out = {}
        for part in _parts(keys, _READ):
            marks = ",".join("?" * len(part))
            for key, raw in database.execute(f"SELECT key, vector FROM vectors WHERE key IN ({marks})", part):
                out[key] = np.frombuffer(raw, dtype=np.float32)
                if out[key].shape != (self.width,):
                    raise ValueError(
                        f"the cache {self.file} holds vectors of {len(out[key])} numbers, not {self.width}: delete it"
                    )
        return out


def _parts(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    at = iter(items)
    while part := list(islice(at, size)):
        yield part
