"""PolicyScheduler: vLLM's own scheduler with another waiting queue; of its surface that is all that is touched."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from lengthwise.sched import Policy
from lengthwise.sched.policy import overrides

from .queue import PolicyQueue

GIVES = frozenset({"prediction", "distribution", "client", "slo", "step_time"})  # of what a policy may need


def build(node: Any) -> Any:
    """What a config node stands for: `_target_` called with the rest, nested nodes first, as Hydra does it."""
    if not isinstance(node, Mapping):
        return node
    arguments = {key: build(value) for key, value in node.items() if key != "_target_"}
    if "_target_" not in node:
        return arguments
    module, _, name = node["_target_"].rpartition(".")
    return getattr(import_module(module), name)(**arguments)


def policy_of(vllm_config: Any) -> Policy:
    """The policy that `additional_config` names. Raises ValueError where it names none, or one that needs what vLLM does not
    give."""
    config = dict((vllm_config.additional_config or {}).get("lengthwise", {}))
    policy = build(config.pop("policy", None))
    if not isinstance(policy, Policy) or config:
        raise ValueError(
            f'additional_config={vllm_config.additional_config!r}: it must hold {{"lengthwise": {{"policy": NODE}}}}, the '
            "node of a policy, and no other key beside it"
        )
    needs = set(policy.needs)
    needs |= {"preempt"} if policy.preemptive else set()
    needs |= {"backfill"} if policy.backfill else set()
    needs |= {"victim"} if overrides(policy, "victim") else set()
    if missing := sorted(needs - GIVES):
        raise ValueError(f"{type(policy).__name__} needs {missing}; vLLM gives a policy {sorted(GIVES)}")
    if vllm_config.kv_transfer_config is not None:
        raise ValueError("kv_transfer_config: requests that wait for their KV stand in another queue, that no policy orders")
    return policy


class _Ordered:
    """Before a scheduler of vLLM among the bases: its waiting requests in the order of the policy."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        policy = policy_of(vllm_config)
        super().__init__(vllm_config, *args, **kwargs)  # type: ignore[call-arg]
        pool = (self.cache_config.num_gpu_blocks - 1) * self.block_size  # type: ignore[attr-defined]  # one stands for none
        rows = vllm_config.scheduler_config.max_num_seqs
        self.waiting = PolicyQueue(policy, self.get_kv_cache_usage, pool, rows)  # type: ignore[attr-defined]

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        self.waiting.begin(self.finished_req_ids)  # type: ignore[attr-defined]
        output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        self.waiting.scheduled(output.total_num_scheduled_tokens > 0)
        return output

    def update_from_output(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = super().update_from_output(scheduler_output, *args, **kwargs)  # type: ignore[misc]
        ran = scheduler_output.total_num_scheduled_tokens > 0
        self.waiting.ended(ran, self.finished_req_ids)  # type: ignore[attr-defined]
        return outputs


class PolicyScheduler(_Ordered, Scheduler):  # type: ignore[misc]
    """`scheduler_cls` where scheduling is not asynchronous: on the CPU, or with async_scheduling=False."""


class AsyncPolicyScheduler(_Ordered, AsyncScheduler):  # type: ignore[misc]
    """`scheduler_cls` with asynchronous scheduling. What a policy hears of generated tokens is then a step late."""
