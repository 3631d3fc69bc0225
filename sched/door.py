"""The door: what can never be served is refused on arrival, with both numbers."""

from __future__ import annotations

from .kv import KVCache
from .request import Request


def refusal(req: Request, kv: KVCache, *, whole_prompts: bool, token_budget: int, max_model_len: int, clip: bool) -> str | None:
    """Why `req` can never be served, or None. With `clip`, shortens its max_new_tokens to max_model_len instead."""
    if req.prompt_len < 1 or req.max_new_tokens < 1:
        return f"prompt_len {req.prompt_len} and max_new_tokens {req.max_new_tokens} must be at least 1"
    total = req.prompt_len + req.max_new_tokens
    if total > max_model_len:
        if not clip or req.prompt_len >= max_model_len:
            asked = f"prompt {req.prompt_len} + max_new_tokens {req.max_new_tokens} = {total} tokens"
            return f"{asked}, max_model_len is {max_model_len}"
        req.max_new_tokens = max_model_len - req.prompt_len
    if whole_prompts and req.prompt_len > token_budget:
        return f"prompt {req.prompt_len} tokens, unchunked prefill takes at most token_budget {token_budget}"
    need, limit = kv.blocks_at_end(req), kv.num_blocks - kv.watermark_blocks
    if need > limit:
        return (
            f"prompt {req.prompt_len} + max_new_tokens {req.max_new_tokens} - 1 needs {need} KV blocks, the pool has "
            f"{limit} ({kv.num_blocks} less the watermark {kv.watermark_blocks})"
        )
    return None
