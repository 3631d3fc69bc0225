"""What a model keeps of a token, found by running two tokens through it while a recording function stands in for attention.

Module attributes differ by architecture (fused projections, no head_dim, windows by layer); calls of the attention interface do
not. What the packed path cannot do is refused here, with the reason.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from .pool import LayerSpec

PROBE = "lengthwise_probe"
FULL, SLIDING = "full_attention", "sliding_attention"
HARMLESS = {"dropout", "scaling", "sliding_window", "softcap", "is_causal", "position_ids", "position_embeddings"} | {
    "use_cache", "output_attentions", "output_router_logits", "output_hidden_states", "return_dict", "cache_position", "cache"
}  # fmt: skip


class Call(NamedTuple):
    """One call of the attention interface."""

    module: nn.Module
    query: torch.Size
    key: torch.Size
    value: torch.Size
    masked: bool
    kwargs: dict[str, Any]


class Probed(NamedTuple):
    """modules, specs: the attention modules in order and what each keeps. logit_scale, logit_cap: what the model does to the
    output of its head, `vocab_size` wide: cap * tanh(scale * x / cap)."""

    modules: list[nn.Module]
    specs: list[LayerSpec]
    logit_scale: float
    logit_cap: float | None
    vocab_size: int


def probe(model: Any, decoder: nn.Module) -> Probed:
    """Run two tokens through `model`. Leaves another attention implementation chosen. Raises ValueError with the reason when it
    does something that the packed path cannot."""
    name = type(model).__name__
    refuse_config(model)
    calls: list[Call] = []

    def record(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        calls.append(Call(module, query.shape, key.shape, value.shape, attention_mask is not None, kwargs))
        return value.repeat_interleave(query.shape[1] // key.shape[1], dim=1).transpose(1, 2), None

    AttentionInterface.register(PROBE, record)
    choose_attention(model, PROBE)
    head: dict[str, Tensor] = {}

    def loud(module: nn.Module, args: Any, output: Any) -> Any:
        """Scale what goes into the head until a softcap would show, and keep it."""
        raw = model.get_output_embeddings()(output.last_hidden_state)
        factor = 50.0 / max(float(raw.abs().max()), 1e-6)
        head["hidden"] = output.last_hidden_state = output.last_hidden_state * factor
        return output

    hook = decoder.register_forward_hook(loud)
    try:
        ids = torch.tensor([[1, 0]], device=model.device)
        with torch.no_grad():
            logits = model(input_ids=ids, position_ids=torch.arange(2, device=model.device)[None], use_cache=False).logits
    finally:
        hook.remove()
    if not calls:
        raise ValueError(f"{name} is not served: its attention does not go through transformers' attention interface")
    specs = layer_specs(model, calls)
    if "hidden" not in head:
        raise ValueError(f"{name} is not served: its head does not follow its decoder")
    raw = model.get_output_embeddings()(head["hidden"])
    scale, cap = head_of(model, raw.float(), logits.float())
    return Probed([call.module for call in calls], specs, scale, cap, int(logits.shape[-1]))


def choose_attention(model: PreTrainedModel, name: str) -> None:
    try:
        model.set_attn_implementation(name)
    except (ValueError, NotImplementedError, ImportError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{type(model).__name__} is not served: it takes no attention function of ours ({reason})") from error


def refuse_config(model: PreTrainedModel) -> None:
    """What the configuration alone tells. Raises ValueError."""
    name, config = type(model).__name__, model.config
    if config.is_encoder_decoder:
        raise ValueError(f"{name} is not served: it is an encoder-decoder")
    if config.get_text_config(decoder=True) is not config:
        raise ValueError(
            f"{name} is not served: its decoder is a part of it ({type(config).__name__}); give the text model alone"
        )
    if getattr(config, "use_bidirectional_attention", None):
        raise ValueError(f"{name} is not served: its attention is not causal (use_bidirectional_attention)")
    if getattr(config, "alibi", False) or getattr(config, "position_embedding_type", None) == "alibi":
        raise ValueError(f"{name} is not served: ALiBi adds position biases to the scores")
    types = set(getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ())
    strange = sorted(str(kind) for kind in types - {FULL, SLIDING, "attention"})
    if strange:
        raise ValueError(
            f"{name} is not served: it has layers of type {', '.join(strange)}, and only full and sliding attention run"
        )


def layer_specs(model: PreTrainedModel, calls: list[Call]) -> list[LayerSpec]:
    """One LayerSpec a call. Group 0 are the layers that attend all, then the windows, widest first. Raises ValueError."""
    name, config = type(model).__name__, model.config
    shapes: list[tuple[int, int, int, int | None]] = []
    for call in calls:
        if call.masked:
            raise ValueError(f"{name} is not served: it gives its attention a mask or biases of its own")
        unknown = sorted(key for key, given in call.kwargs.items() if given is not None and key not in HARMLESS)
        if "s_aux" in unknown or "sinks" in unknown:
            raise ValueError(f"{name} is not served: its attention has sinks ({', '.join(unknown)})")
        if unknown:
            raise ValueError(
                f"{name} is not served: its attention takes {', '.join(unknown)}, which the packed path does not know"
            )
        if call.kwargs.get("is_causal") is False or getattr(call.module, "is_causal", True) is False:
            raise ValueError(f"{name} is not served: its attention is not causal")
        if call.kwargs.get("dropout"):
            raise ValueError(f"{name} is not served: dropout {call.kwargs['dropout']} is on; a served model is in eval mode")
        (_, num_heads, _, q_dim), (_, num_kv_heads, _, k_dim) = call.query, call.key
        if q_dim != k_dim or num_heads % num_kv_heads or call.value[1] != num_kv_heads:
            raise ValueError(
                f"{name} is not served: query {tuple(call.query)}, key {tuple(call.key)}, value {tuple(call.value)}"
            )
        shapes.append((num_kv_heads, k_dim, call.value[3], call.kwargs.get("sliding_window") or None))
    num_layers, modules = config.num_hidden_layers, {id(call.module) for call in calls}
    if len(modules) < len(calls):
        raise ValueError(f"{name} is not served: one of its attention modules runs more than once in a forward")
    if len(calls) < num_layers:
        raise ValueError(
            f"{name} is not served: {num_layers - len(calls)} of its {num_layers} layers keep state outside attention"
        )
    windows = sorted({window for *_, window in shapes}, key=lambda w: -w if w else float("-inf"))
    window, most = getattr(config, "sliding_window", None), getattr(config, "max_position_embeddings", None)
    sliding = [kind == SLIDING for kind in getattr(config, "layer_types", None) or ()]
    if windows == [None] and not sliding and window and window < (most or window + 1):
        raise ValueError(f"{name} is not served: its configuration has a window of {window}, its attention none")
    if len(sliding) == len(shapes) and any(s != bool(w) for s, (*_, w) in zip(sliding, shapes, strict=True)):
        raise ValueError(f"{name} is not served: its layer_types say {sum(sliding)} sliding layers, its attention has others")
    return [LayerSpec(*shape, group=windows.index(shape[3])) for shape in shapes]


def head_of(model: PreTrainedModel, raw: Tensor, logits: Tensor) -> tuple[float, float | None]:
    """(scale, cap) with which `raw`, the output of the bare head, becomes the model's own `logits`. Raises ValueError."""
    config = model.config
    cap = getattr(config, "final_logit_softcapping", None)
    scales = [1.0]
    for given in (getattr(config, "logit_scale", None), getattr(config, "logits_scaling", None)):
        if given:  # Cohere multiplies by its logit_scale, Granite divides by its logits_scaling
            scales += [float(given), 1.0 / float(given)]
    for limit in {None: [None]}.get(cap, [cap, None]):
        for scale in scales:
            error = (finish(raw, scale, limit) - logits).norm() / logits.norm().clamp_min(1e-6)
            if error < (1e-4 if model.dtype == torch.float32 else 2e-2):
                return scale, limit
    raise ValueError(f"{type(model).__name__} is not served: its head does more to the logits than a scale and a softcap")


def finish(logits: Tensor, scale: float, cap: float | None) -> Tensor:
    """Logits as the model gives them from the output of its bare head, any shape."""
    if scale != 1.0:
        logits = logits * scale
    if cap is not None:
        logits = torch.tanh(logits / cap) * cap
    return logits
