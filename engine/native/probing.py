"""HiddenProbe: the hidden states of one layer, for predictors that watch a request decode (TRAIL, ICLR 2025, section 3)."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .model import ServedModel


class HiddenProbe:
    """Keeps what layer `layer` (from 0; negative from the end) gives in each forward of `model`: `states` (E, hidden), of the
    tokens in batch.emit. Raises ValueError for a layer that is not there, and for a decoder that is not run layer by layer."""

    def __init__(self, model: ServedModel, layer: int) -> None:
        layers = decoder_layers(model)
        if not -len(layers) <= layer < len(layers):
            raise ValueError(f"layer {layer} of {model.name}: it has {len(layers)} layers")
        if model.inner is not model.model.get_decoder():
            raise ValueError(f"{model.name} is compiled: its layers cannot be looked at")
        self.states: Tensor | None = None
        self._model = model
        self._hook = layers[layer].register_forward_hook(self._keep)

    def close(self) -> None:
        """Look no more."""
        self._hook.remove()

    def _keep(self, module: nn.Module, args: Any, output: Any) -> None:
        batch = self._model.current_batch
        hidden = output[0] if isinstance(output, tuple) else output
        self.states = None if batch is None else hidden.reshape(-1, hidden.shape[-1]).index_select(0, batch.emit)


def decoder_layers(model: ServedModel) -> nn.ModuleList:
    """The layers of the decoder, one for each attention. Raises ValueError where there is no such list."""
    for module in model.model.get_decoder().modules():
        if isinstance(module, nn.ModuleList) and len(module) == len(model.layers):
            return module
    raise ValueError(f"{model.name} has no list of {len(model.layers)} layers to look at")
