"""vLLM's requests in the order of a Lengthwise policy: a `scheduler_cls` for vLLM 0.32, which is imported nowhere else.

Whatever decides is configuration, as plain as JSON, so that it reaches the process that vLLM starts for its engine:

    LLM(model, scheduler_cls="lengthwise.engine.vllm.PolicyScheduler",
        additional_config={"lengthwise": {"policy": {"_target_": "lengthwise.sched.policies.sjf.SJF", "by": "mean"}}})

    vllm serve MODEL --scheduler-cls lengthwise.engine.vllm.PolicyScheduler \\
        --additional-config '{"lengthwise": {"policy": {"_target_": "lengthwise.sched.policies.sjf.SJF", "by": "mean"}}}'

`policy` is what stands in a node of conf/policy, nested ones too. A request brings what the policy is to know of it in
`SamplingParams(extra_args={"predicted_len": 120, "client": "a", "slo_ttft": 0.5})`, over HTTP in `vllm_xargs`; how each is read
says request.py. `AsyncPolicyScheduler` is the same on vLLM's asynchronous scheduler, its own choice where there is a GPU.

The policy decides who is admitted next, and when (`admit`). What vLLM decides stays vLLM's: chunks and budgets, whether a
request fits, who of the running is preempted when memory runs out; nobody is ever preempted for one who waits. A policy that
needs more than that is refused when the engine starts.
"""

from .scheduler import GIVES, AsyncPolicyScheduler, PolicyScheduler

__all__ = ["GIVES", "AsyncPolicyScheduler", "PolicyScheduler"]
