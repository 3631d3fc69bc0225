"""What a vLLM request is to a policy.

What a client says never raises, for in vLLM an error over one request ends the engine: what cannot be read is warned of and
left out.
"""

from __future__ import annotations

import math
from typing import Any

from vllm.logger import init_logger
from vllm.v1.request import Request as VllmRequest

from lengthwise.sched import SLO, LengthDistribution, Request

logger = init_logger("vllm.lengthwise")  # vLLM shows no others


def as_request(theirs: VllmRequest, rid: int, start: float, now: float) -> Request:
    """`theirs` as a policy sees it; times in s since `start`, vLLM's wall clock. No arrival lies after `now`.

    Of `extra_args`: `client`; `slo_ttft`, `slo_tpot`, `slo_e2e` in s; `predicted_len` as `prediction` reads it.
    """
    said = (theirs.sampling_params and theirs.sampling_params.extra_args) or {}
    slo = {name: seconds for name in ("ttft", "tpot", "e2e") if (seconds := _seconds(said, f"slo_{name}", theirs.request_id))}
    return Request(
        rid,
        min(theirs.arrival_time - start, now),
        theirs.num_prompt_tokens,
        theirs.max_tokens,
        prediction=prediction(said.get("predicted_len"), theirs.max_tokens, theirs.request_id),
        prompt_ids=theirs.prompt_token_ids,
        client=str(said["client"]) if "client" in said else None,
        priority=float(theirs.priority),
        slo=SLO(**slo) if slo else None,
    )


def prediction(said: Any, max_tokens: int, request_id: str) -> LengthDistribution:
    """`said`: tokens, or n >= 2 of them that are the quantiles at 1/(n+1) ... n/(n+1). Without it a request is taken to be as
    long as it may become: `max_tokens`."""
    if said is not None:
        try:
            if isinstance(said, (list, tuple)):
                return LengthDistribution.from_quantiles([(i + 1) / (len(said) + 1) for i in range(len(said))], said)
            return LengthDistribution.point(said)
        except (TypeError, ValueError) as error:
            logger.warning("request %s: predicted_len=%r is left out: %s", request_id, said, error)
    return LengthDistribution.point(float(max_tokens))


def _seconds(said: dict[str, Any], name: str, request_id: str) -> float | None:
    value = said.get(name)
    if value is None or (isinstance(value, (int, float)) and 0.0 < value < math.inf):
        return value
    logger.warning("request %s: %s=%r is left out: it must be seconds > 0", request_id, name, value)
    return None
