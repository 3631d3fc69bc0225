"""vLLM's requests in the order of a Lengthwise policy: a `scheduler_cls` for vLLM 0.32, which is imported nowhere else.

Whatever decides is configuration, as plain as JSON, so that it reaches the process that vLLM starts for its engine:

    LLM(model, scheduler_cls="lengthwise.engine.vllm.PolicyScheduler",
        additional_config={"lengthwise": {"policy": {"_target_": "lengthwise.sched.policies.sjf.SJF", "by": "mean"}}})

    vllm serve MODEL --scheduler-cls lengthwise.engine.vllm.PolicyScheduler \\
        --additional-config '{"lengthwise": {"policy": {"_target_": "lengthwise.sched.policies.sjf.SJF", "by": "mean"}}}'

`policy` is what stands in a node of conf/policy, nested ones too, interpolations aside; numbers that are keys of a mapping, as
in WRR's weights, get lost in JSON, not in Python. Of Lengthwise the environment of vLLM needs this package alone (`pip install
--no-deps`, or a path): neither this folder nor `sched` imports more than vLLM and numpy.

A request brings what the policy is to know of it in `SamplingParams(extra_args={"predicted_len": 120, "client": "a"})`, over
HTTP in `vllm_xargs`; request.py says what there is and how it is read. Priorities are vLLM's own, lower first; it takes them
with `scheduling_policy="priority"` only, which then also chooses by them whom to preempt.

The policy decides who is admitted next, and when (`admit`). What vLLM decides stays vLLM's: chunks and budgets, whether a
request fits, whom of the running to preempt when memory runs out; nobody is ever preempted for one who waits. A policy that
needs more than that is refused when the engine starts, by its name and what it needs. A step counts for one token of each
request that runs: with speculative decoding that is too few.

`PolicyScheduler` is for synchronous scheduling (as on the CPU), `AsyncPolicyScheduler` for asynchronous (vLLM's own choice on
GPUs). Policies of one's own are named alike; their module must be on the path of vLLM's processes (PYTHONPATH).
"""

from .scheduler import GIVES, AsyncPolicyScheduler, PolicyScheduler

__all__ = ["GIVES", "AsyncPolicyScheduler", "PolicyScheduler"]
