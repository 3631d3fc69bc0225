"""Names: of the pieces of a prompt whose tokens are known, and tokens for a prompt of which only the names are.

Both ways round one rule holds, which the prefix cache lives by: prompts share a name exactly where they share all tokens up to
the end of that piece (Request.block_hashes).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .philox import MASK, Words, halves, philox

_PIECE, _REST = np.uint64(1), np.uint64(2)  # the last counter word: tokens of a named piece, tokens of one request alone


def name_pieces(prompt_ids: Sequence[int], hash_tokens: int, salt: int = 0) -> list[int]:
    """Names, 64-bit with sign, of the whole pieces of `hash_tokens` tokens: each a digest of the name before it and of the
    piece's ids. Prompts that do not share a `salt` share no name. Raises ValueError for hash_tokens < 1 and for ids outside of
    0 to 2^31 - 1."""
    if hash_tokens < 1:
        raise ValueError(f"hash_tokens is {hash_tokens}, the least is 1")
    ids = np.asarray(prompt_ids, dtype=np.int64)
    if ids.size and not 0 <= ids.min() <= ids.max() < 2**31:
        raise ValueError(f"token ids go from {ids.min()} to {ids.max()}: from 0 to {2**31 - 1} can be named")
    data, size = memoryview(ids.astype("<i4").tobytes()), 4 * hash_tokens
    digest = (salt & MASK).to_bytes(8, "little")
    names = []
    for start in range(0, len(data) - size + 1, size):
        digest = hashlib.blake2b(digest + data[start : start + size], digest_size=8).digest()
        names.append(int.from_bytes(digest, "little", signed=True))
    return names


def synthetic_ids(
    block_hashes: Sequence[int],
    hash_tokens: int,
    prompt_len: int,
    vocab_size: int,
    rid: int,
    seed: int = 0,
    first_id: int = 0,
) -> NDArray[np.int64]:
    """Token ids (prompt_len,) from first_id to vocab_size - 1 for a prompt known by the names of its pieces.

    A named whole piece gets ids by its name alone, the rest by (seed, rid). Names past the last whole piece, as those by place
    in a conversation have them, are not looked at. Where an answer is named, the next prompt has other ids there than the model
    generated.

    Raises ValueError for a vocabulary without ids from first_id on, or names without hash_tokens.
    """
    if not 0 <= first_id < vocab_size:
        raise ValueError(f"first_id is {first_id}: from 0 to {vocab_size - 1}, one less than the vocabulary")
    if len(block_hashes) and hash_tokens < 1:
        raise ValueError(f"hash_tokens is {hash_tokens} with {len(block_hashes)} names, the least is 1")
    part: Any = block_hashes[: prompt_len // hash_tokens] if hash_tokens > 0 else ()
    names = np.asarray(part, dtype=np.int64).view(np.uint64)
    zero = np.zeros((1, 1), dtype=np.uint64)
    named = _words((zero, zero, _PIECE + zero), names[:, None], hash_tokens).reshape(-1)
    own = (*halves(np.uint64(rid & MASK) + zero), _REST + zero)
    rest = _words(own, np.uint64(seed & MASK) + zero, prompt_len - len(named)).reshape(-1)
    words = np.concatenate((named, rest))
    return ((words * np.uint64(vocab_size - first_id)) >> np.uint64(32)).astype(np.int64) + first_id


def _words(counter: tuple[Words, Words, Words], keys: Words, length: int) -> Words:
    """Random 32-bit words (n, length) of keys (n, 1) and three of the counter's words; the first counts along the row."""
    places = np.arange(-(-length // 4), dtype=np.uint64)[None]
    quads = philox((places, *counter), halves(keys))
    return np.stack(np.broadcast_arrays(*quads), axis=-1).reshape(len(keys), 4 * places.size)[:, :length]
