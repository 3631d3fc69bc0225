"""NativeEngine: a model, its attention backend and its KV memory in one place, ready to be driven by a scheduler."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from lengthwise.sched import Clock, Plan, Request, Swap
from lengthwise.sched.kv import KVCache
from lengthwise.sched.kv.grouped import Grouped

from .attention.backend import Attention
from .attention.choose import choose
from .compiled import CompiledDecoder, compile_model
from .door import check_stops
from .executor import NativeExecutor
from .generation import GREEDY, Generation
from .graphs import DecodeGraphs, decode_graphs
from .linear import pack_linears
from .memory import kv_bytes_per_token, pool_tokens
from .model import ServedModel
from .pool import Pool
from .probing import HiddenProbe
from .quantise import quantise
from .sampling import SamplingParams
from .text import Text

LINEARS = ("auto", "torch", "int8")
KV_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
AnswerLens = Mapping[int, int] | Sequence[int]  # rid -> length in tokens; who is missing in a mapping ends by itself


class NativeEngine:
    """Serves `model`. attention: a backend by name, or the fastest that works there. kv_dtype: what KV is kept in, a key of
    KV_DTYPES; None: as the model computes. linears: how linear layers keep their weights: auto, packed for the CPU where that
    is faster; torch, as loaded; int8. What either does to outputs, benchmarks/kv_dtypes.py measures. compiled: compile the
    decoder, once, for the CPU. threads: of the CPU; None: as torch has them. memory_share: of the memory that is free, what the
    KV pool may take. Mutates the model's layers."""

    def __init__(
        self,
        model: ServedModel,
        *,
        attention: str = "auto",
        kv_dtype: str | None = None,
        linears: str = "auto",
        compiled: bool = False,
        threads: int | None = None,
        memory_share: float = 0.8,
    ) -> None:
        if not 0.0 < memory_share <= 1.0:
            raise ValueError(f"memory_share {memory_share} is not within (0, 1]")
        if linears not in LINEARS:
            raise ValueError(f"linears={linears!r} is not one of {', '.join(LINEARS)}")
        if threads is not None:
            torch.set_num_threads(threads)
        self.model = model
        self.kv_dtype = kv_dtype or KV_NAMES[model.dtype]
        self._asked = attention
        self.attention = self._choose(block_size=16)
        self.memory_share = memory_share
        self.compiled = compiled
        self._looking: HiddenProbe | None = None
        if linears == "int8":
            if not quantise(model.model) and kept(model.model) != "int8":
                raise ValueError(f"{model.name} has no linear layers to quantise: they are packed already, load it anew")
        elif linears == "auto" and model.device.type == "cpu":
            pack_linears(model.model)
        self.linears = kept(model.model)

    @property
    def kv_bytes_per_token(self) -> int:
        return kv_bytes_per_token(self.model.layers, self.kv_dtype)

    def pool_tokens(self) -> int:
        """Tokens of KV that fit into what memory is free now. Raises ValueError when none do."""
        return pool_tokens(self.model, self.kv_dtype, self.memory_share)

    def new_pools(self, kv: KVCache) -> list[Pool]:
        """Memory for what `kv` counts, attached to the model's layers. Mutates `attention`, if another backend is the one to
        choose for blocks of that size. Raises ValueError where groups of layers do not fit the model."""
        model = self.model
        self.attention = self._choose(kv.block_size)
        if not isinstance(kv, Grouped):
            return model.new_pools(self.attention, kv.num_blocks, kv.block_size, self.kv_dtype)
        places = kv.place([spec.window for spec in model.layers])
        if len({(spec.num_kv_heads, spec.k_dim, spec.v_dim) for spec in model.layers}) > 1:
            raise ValueError(f"layers of {model.name} differ in what they keep of a token: they cannot share blocks")
        model.layers = [replace(spec, group=group) for spec, (group, _) in zip(model.layers, places, strict=True)]
        pools = [
            self.attention.new_pool(model.layers[0], kv.num_blocks, kv.block_size, self.kv_dtype, model.device)
            for _ in range(kv.layers_per_block)
        ]
        model.attach(self.attention, [pools[number] for _, number in places])
        return pools

    def _graphs(self, kv: KVCache, max_num_seqs: int) -> DecodeGraphs | None:
        sizes = {"block_size": kv.block_size, "max_num_seqs": max_num_seqs, "max_model_len": self.model.max_positions}
        return decode_graphs(self.model, self.attention, **sizes)

    def _choose(self, block_size: int) -> Attention:
        specs, softcap = self.model.layers, getattr(self.model.config, "attn_logit_softcapping", None)

        def unfit(attention: Any) -> str | None:
            ask = getattr(attention, "unfit", None)
            reasons = (ask(spec, block_size, self.kv_dtype, softcap) for spec in specs) if ask else ()
            return next((reason for reason in reasons if reason), None)

        return choose(self._asked, self.model.device, unfit)

    def executor(
        self,
        kv: KVCache,
        clock: Clock,
        *,
        sampling: Callable[[Request], SamplingParams] | None = None,
        answer_lens: AnswerLens | None = None,
        seconds: Callable[[Plan], float] | None = None,
        swap_seconds: Callable[[Sequence[Swap]], float] | None = None,
        seed: int = 0,
        max_num_seqs: int = 256,
        texts: bool = False,
        probe: HiddenProbe | None = None,
        depth: int | str = "auto",
    ) -> NativeExecutor:
        """An executor for one run, with empty KV memory as large as `kv` counts. One at a time: the layers of the model are
        attached to its pools.

        sampling: how a request's tokens are chosen; None: greedily. answer_lens: answers are so long whatever their tokens are;
        None: end tokens decide. seconds, swap_seconds: step and copy times as told, for a clock that jumps. texts: keep texts
        of answers beside their tokens; those with stop strings always are. probe: the layer whose hidden states plan.probe_rows
        are about; None: the last. depth: steps in flight, 1 or 2; auto: 2 on a GPU, there only where going ahead pays. Raises
        ValueError for texts without a tokenizer, for an answer of no token, and where two steps cannot be in flight.
        """
        model = self.model
        if texts and model.tokenizer is None:
            raise ValueError(f"{model.name} has no tokenizer: it gives tokens only")
        for rid, length in () if answer_lens is None else items(answer_lens):
            if length < 1:
                raise ValueError(f"the answer of request {rid} is to have {length} tokens, the least is 1")

        def begin(request: Request) -> Generation:
            ids = request.prompt_ids
            if ids is None or len(ids) != request.prompt_len:
                there = "none" if ids is None else len(ids)
                raise ValueError(f"request {request.rid} has {there} prompt_ids, its prompt_len is {request.prompt_len}")
            params = GREEDY if sampling is None else sampling(request)
            length = forced(answer_lens, request.rid)
            stops = params.stop if length is None else ()  # a length that is given holds whatever the text is
            check_stops(f"request {request.rid}", params, model.tokenizer is not None)
            text = Text(model.tokenizer, stops, params.min_new_tokens) if texts or stops else None
            return Generation(
                request,
                ids,
                params,
                seed=seed + request.rid,
                end_ids=model.eos_ids,
                answer_len=length,
                text=text,
            )

        pools = self.new_pools(kv)
        if self.compiled and not isinstance(model.inner, CompiledDecoder):
            compile_model(model)
        run = model.forward
        if probe is None and model.device.type == "cuda" and (graphs := self._graphs(kv, max_num_seqs)) is not None:
            run = graphs.run  # a replay runs no hooks
        return NativeExecutor(
            model, run, pools, kv, clock, begin, max_num_seqs=max_num_seqs, seconds=seconds, swap_seconds=swap_seconds,
            probe=probe, depth=self.depth(depth), always_ahead=depth == 2,
        )  # fmt: skip

    def look_at(self, layer: int | None) -> HiddenProbe | None:
        """What keeps the hidden states of `layer`, in place of the layer looked at before; None: of none any more. Raises
        ValueError as HiddenProbe."""
        if layer is not None and self.compiled:  # it may not have been compiled yet
            raise ValueError(f"{self.model.name} is to be compiled: its layers cannot be looked at")
        if self._looking is not None:
            self._looking.close()
        self._looking = None if layer is None else HiddenProbe(self.model, layer)
        return self._looking

    def depth(self, asked: int | str) -> int:
        """Steps in flight where `asked` are wanted: 1, 2 or auto. auto is 2 on a GPU where that can be; a CPU computes with the
        cores that schedule. Raises ValueError for others, and for 2 where it cannot be."""
        reason = None
        if self.model.num_ranks > 1:
            reason = f"{self.model.num_ranks} ranks are told one step at a time"
        elif getattr(self.attention, "waits", False):
            reason = f"the attention backend {self.attention.name!r} waits for the step before"
        if asked == "auto":
            return 2 if reason is None and self.model.device.type == "cuda" else 1
        if asked not in (1, 2):
            raise ValueError(f"depth {asked!r} is not one of auto, 1, 2")
        if asked == 2 and reason:
            raise ValueError(f"depth 2 cannot be: {reason}")
        return int(asked)


def items(answers: AnswerLens) -> Iterable[tuple[int, int]]:
    return answers.items() if isinstance(answers, Mapping) else enumerate(answers)


def forced(answers: AnswerLens | None, rid: int) -> int | None:
    """The length that the answer of request `rid` is to have; None: its own end decides."""
    if answers is None or isinstance(answers, Mapping):
        return None if answers is None else answers.get(rid)
    return answers[rid]


def kept(model: torch.nn.Module) -> str:
    """How linear layers keep their weights: torch, packed or int8."""
    bits = {getattr(module, "bits", None) for module in model.modules()}
    return "int8" if 8 in bits else "packed" if 16 in bits else "torch"
