"""What runs inside the environment that has vLLM: `python vllm_host.py` reads a job (JSON) and answers on the last line.

A job is a list of runs of vLLM's scheduler alone, with a model that is not there and a clock that ticks once a step, or one run
of a whole engine. Policies of the tests are here, for the engine's process has to find them too.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from lengthwise.sched import Policy
from lengthwise.sched.policies import FCFS

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 512,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "hidden_act": "silu",
    "bos_token_id": 0, "eos_token_id": 1, "torch_dtype": "bfloat16",
}  # fmt: skip


class Constant(Policy):
    """Everybody is alike."""

    def key(self, req, view):
        return 0.0


class Told(FCFS):
    """First come first served, and writes down what it is told."""

    last: Told

    def __init__(self) -> None:
        self.calls: list[list] = []
        Told.last = self

    def _note(self, what, req, *more):
        self.calls.append([what, req.rid, req.phase.name, *more])

    def on_arrival(self, req):
        self._note("arrival", req, req.prompt_len, req.max_new_tokens, req.prediction.mean(), req.client, req.priority)

    def on_schedule(self, req, view):
        self._note("schedule", req, view.num_running, view.num_waiting)

    def on_preempt(self, req, view):
        self._note("preempt", req, view.generated(req))

    def on_steps(self, num_steps, view):
        self.calls.append(["steps", view.step, view.now, view.step_time, view.num_running, view.free_tokens])

    def on_finish(self, req):
        self._note("finish", req)


def model_folder(folder: Path) -> str:
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return str(folder)


def settings(run: dict) -> dict:
    """Of an engine: with the policy of `run`, or stock where it names none."""
    wanted = {"scheduling_policy": run.get("stock", "fcfs"), "max_num_seqs": run["slots"]}
    if "policy" in run:
        wanted["scheduler_cls"] = f"lengthwise.engine.vllm.{run.get('scheduler', 'PolicyScheduler')}"
        wanted["additional_config"] = {"lengthwise": {"policy": run["policy"], **run.get("beside", {})}}
    return wanted


def params_of(request: dict):
    from vllm import SamplingParams

    num = request["output_len"]
    return SamplingParams(temperature=0.0, max_tokens=num, min_tokens=num, ignore_eos=True, detokenize=False,
                          extra_args=request.get("extra"))  # fmt: skip


# --- the scheduler alone --------------------------------------------------------------------------------------------------


def make_scheduler(run: dict, model: str):
    import torch
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    config = EngineArgs(
        model=model, skip_tokenizer_init=True, load_format="dummy", max_model_len=1024, max_num_batched_tokens=256,
        block_size=16, enable_prefix_caching=False, **settings(run),
    ).create_engine_config()  # fmt: skip
    blocks = run.get("blocks", 10_000)
    config.cache_config.num_gpu_blocks = blocks
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=32, dtype=torch.bfloat16)
    kv = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
    made = AsyncScheduler if run.get("scheduler") == "stock async" else config.scheduler_config.get_scheduler_cls()
    return made(
        vllm_config=config, kv_cache_config=kv, structured_output_manager=StructuredOutputManager(config), block_size=16
    )


def play(run: dict, model: str) -> dict:
    """Steps of a scheduler, a second each: who was admitted, preempted and finished, and when."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request, RequestStatus

    try:
        scheduler = make_scheduler(run, model)
    except ValueError as error:
        return {"refused": str(error)}
    start, step = 1.8e9, 0
    if "policy" in run:
        scheduler.waiting.clock, scheduler.waiting._start = lambda: start + step, start
    out: dict = {"admitted": [], "preempted": [], "finished": {}}
    ready, blocked = scheduler._handle_blocked_waiting_request, run.get("blocked", {})
    scheduler._handle_blocked_waiting_request = lambda r: step >= blocked.get(r.request_id, 0) and ready(r)
    coming = sorted(run["requests"], key=lambda r: r["at"])
    while coming or scheduler.has_requests():
        assert step < 5000, "no end"
        while coming and coming[0]["at"] <= step:
            one = coming.pop(0)
            params: SamplingParams = params_of(one)
            arrived = {"arrival_time": start + one["at"], "priority": one.get("priority", 0)}
            scheduler.add_request(Request(one["id"], [5] * one["prompt_len"], params, None, **arrived))
        for rid in [r for r, at in run.get("aborts", {}).items() if at == step]:
            scheduler.finish_requests(rid, RequestStatus.FINISHED_ABORTED)
        plan = scheduler.schedule()
        came = [r.req_id for r in plan.scheduled_new_reqs] + sorted(plan.scheduled_cached_reqs.resumed_req_ids)
        order = [r.request_id for r in scheduler.running]
        out["admitted"] += [[step, rid] for rid in sorted(came, key=order.index)]
        out["preempted"] += [[step, rid] for rid in sorted(plan.preempted_req_ids or ())]
        ids = list(plan.num_scheduled_tokens)
        known = scheduler.requests
        tokens = [[7] if known[i].num_computed_tokens >= known[i].num_prompt_tokens else [] for i in ids]
        step += 1
        scheduler.update_from_output(plan, ModelRunnerOutput(ids, {i: n for n, i in enumerate(ids)}, tokens))
        out["finished"].update((i, step) for i in ids if i not in scheduler.requests)
    if "policy" in run:
        queue = scheduler.waiting
        queue.begin(scheduler.finished_req_ids)
        out["left"] = [len(queue), queue.num_running, len(queue._ours), len(queue._theirs)]
        if "Told" in run["policy"]["_target_"]:
            out["calls"] = sys.modules["vllm_host"].Told.last.calls
    return out


# --- a whole engine -------------------------------------------------------------------------------------------------------


def serve(run: dict, model: str) -> dict:
    """The order in which an engine with one slot finishes requests that all come at once."""
    from vllm import LLM

    llm = LLM(
        model=model, skip_tokenizer_init=True, load_format="dummy", dtype="bfloat16", max_model_len=1024,
        max_num_batched_tokens=1024, enforce_eager=True, enable_prefix_caching=False, disable_log_stats=False,
        **settings(run),
    )  # fmt: skip
    prompts = [{"prompt_token_ids": [5] * r["prompt_len"]} for r in run["requests"]]
    answers = llm.generate(prompts, [params_of(r) for r in run["requests"]], use_tqdm=False)
    rows = [
        (a.metrics.scheduled_ts, r["id"], len(a.outputs[0].token_ids)) for a, r in zip(answers, run["requests"], strict=True)
    ]
    llm.llm_engine.engine_core.shutdown()
    return {"admitted": [rid for _, rid, _ in sorted(rows)], "tokens": {rid: num for _, rid, num in rows}}


def main() -> None:
    job = json.load(sys.stdin)
    model = model_folder(Path(job["folder"]))
    answer = serve(job["serve"], model) if "serve" in job else [play(run, model) for run in job["play"]]
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
