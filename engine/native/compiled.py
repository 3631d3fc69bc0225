"""compile_model: the decoder as one compiled library, kept in the cache, with no Python between its layers.

The Hugging Face code is traced once (torch.export), with the tensors of a Batch and the pools as inputs, and compiled ahead of
time (AOTInductor): attention and packed linear layers stay calls of our operators, what lies between them is fused. Weights are
not part of the library, so that a later start only loads it, in well under a second.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import warnings
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from .attention import interface
from .attention.interface import Attached
from .batch import Batch, Placed
from .cache import cache_dir
from .linear import kernel
from .passes import hold_shared, merge_linears
from .pool import Pool

if TYPE_CHECKING:
    from .model import ServedModel

log = logging.getLogger(__name__)


class Hidden(NamedTuple):
    """last_hidden_state (1, N, hidden), under the name that transformers uses."""

    last_hidden_state: Tensor


class CompiledDecoder:
    """Stands for a decoder's forward: the same hidden states, from the Batch that is current. One library for each way that KV
    is kept; another is made, or loaded, when the model is attached to pools of another kind. loaded: whether the last one came
    from the cache."""

    def __init__(self, model: ServedModel) -> None:
        self.decoder: nn.Module = model.model.get_decoder()
        self.config: Any = model.config
        self.loaded = False
        self._modules = attention_modules(self.decoder)
        if not self._modules:
            raise ValueError("attach pools before compiling: how KV is kept is part of the library")
        self._runs: dict[str, Callable[..., Any]] = {}
        self._run: Callable[..., Any] | None = None
        self._of: Callable[[], Tensor | None] = lambda: None  # the pool that `_run` was made for, not kept alive by this

    def __call__(self, input_ids: Tensor, position_ids: Tensor, **unused: Any) -> Hidden:
        first: Attached = self._modules[0].lengthwise
        batch = first.current.batch
        if batch is None:
            raise ValueError("a compiled decoder ran outside ServedModel.forward: there is no batch")
        if self._run is None or first.pool.tensors[0] is not self._of():
            self.prepare()
        assert self._run is not None
        pools = [list(module.lengthwise.pool.tensors) for module in self._modules]
        return Hidden(self._run(*inputs(batch), pools)[None])

    def prepare(self) -> None:
        """Compile for the pools that are attached now, or load what was compiled. Raises ValueError for pools that are not
        those of the C++ kernel; RuntimeError, with the reason, for a model that cannot be traced or compiled."""
        kernel()  # its operators are part of the library, packed layers or not
        attached = [module.lengthwise for module in self._modules]
        if attached[0].attention.name != "cpu":
            raise ValueError(f"only attention backend 'cpu' is compiled, not {attached[0].attention.name!r}")
        key = key_of(self.decoder, self.config, attached)
        if key not in self._runs:
            self._runs[key] = self._load(cache_dir("compiled", key), attached)
        self._of, self._run = weakref.ref(attached[0].pool.tensors[0]), self._runs[key]

    def _load(self, folder: Path, attached: Sequence[Attached]) -> Callable[..., Any]:
        library, extra = folder / "decoder.pt2", folder / "constants.pt"
        self.loaded = library.exists()
        if not self.loaded:
            with open(folder / "lock", "w") as held:
                fcntl.flock(held, fcntl.LOCK_EX)
                if not library.exists():
                    log.info("compiling the decoder, once: about a minute")
                    make(self.decoder, attached, library, extra)
        run = torch._inductor.aoti_load_package(str(library))
        weights = torch.load(extra, weights_only=True) | weights_of(self.decoder)
        run.load_constants({name: weights[name] for name in run.get_constant_fqns()}, check_full_update=True, user_managed=True)
        return run


def compile_model(model: ServedModel) -> CompiledDecoder:
    """Let `model`, which is attached to its pools, compute by a compiled decoder from now on. Mutates `model.inner`. Pack or
    quantise first. Raises as CompiledDecoder.prepare does."""
    if model.device.type != "cpu":
        raise ValueError(f"the compiled decoder is for the CPU, not {model.device}")
    compiled = CompiledDecoder(model)
    compiled.prepare()
    model.inner = compiled
    return compiled


def attention_modules(decoder: nn.Module) -> list[Any]:
    """The modules that pools are attached to, in order."""
    return [module for module in decoder.modules() if hasattr(module, "lengthwise")]


def inputs(batch: Batch) -> tuple[Any, ...]:
    """The tensors of a Batch that a decoder reads, in the order of the library's arguments."""
    groups = batch.groups
    tables = [g.slots for g in groups], [g.block_tables for g in groups]
    return batch.token_ids, batch.positions, batch.query_start, batch.context_len, *tables


def weights_of(decoder: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by the names that they have in the library, shared ones under each of theirs."""
    found = [*decoder.named_parameters(remove_duplicate=False), *decoder.named_buffers(remove_duplicate=False)]
    return {f"decoder.{name}": tensor.detach() for name, tensor in found}


class Step(nn.Module):
    """The decoder with all that it reads as arguments: what is traced."""

    def __init__(self, decoder: nn.Module, attached: Sequence[Attached]) -> None:
        super().__init__()
        self.decoder = decoder
        self.attached = list(attached)

    def forward(
        self, ids: Tensor, positions: Tensor, starts: Tensor, contexts: Tensor, slots: list[Tensor], tables: list[Tensor],
        pools: list[list[Tensor]],
    ) -> Tensor:  # fmt: skip
        groups = [Placed(s, t) for s, t in zip(slots, tables, strict=True)]
        batch = Batch(ids, positions, starts, contexts, 0, 0, 0, ids, groups)
        modules = attention_modules(self.decoder)
        current = interface.Current(batch)
        try:
            for module, real, tensors in zip(modules, self.attached, pools, strict=True):
                module.lengthwise = Attached(real.spec, real.attention, Pool(tuple(tensors), real.pool.block_size), current)
            out = self.decoder(input_ids=ids[None], position_ids=positions[None], use_cache=False, attention_mask=None)
        finally:
            for module, real in zip(modules, self.attached, strict=True):
                module.lengthwise = real
        hidden: Tensor = out.last_hidden_state[0]
        return hidden


def traced(decoder: nn.Module, attached: Sequence[Attached]) -> Any:
    """The exported program of Step, with our passes done. Raises RuntimeError with the reason."""
    any_size = torch.export.Dim.DYNAMIC
    num_groups = 1 + max(a.spec.group for a in attached)
    example = inputs(example_batch(num_groups))
    rows = {0: any_size}
    sizes = (rows, rows, rows, rows, [rows] * num_groups, [{0: any_size, 1: any_size}] * num_groups)
    pools = [list(a.pool.tensors) for a in attached]
    step = Step(decoder, attached)
    try:
        with torch.no_grad():
            program = torch.export.export(
                step, (*example, pools), dynamic_shapes=(*sizes, [[rows for _ in kept] for kept in pools]), strict=False
            )
    except Exception as error:  # whatever the model's code cannot be traced for
        raise RuntimeError(f"{type(decoder).__name__} cannot be traced: {str(error).splitlines()[0]}") from error
    hold_shared(program.graph_module)
    merge_linears(program.graph_module)
    return program


def example_batch(num_groups: int) -> Batch:
    """Two decoding rows and a chunk, all sizes different and none 0 or 1: equal ones would be taken for always equal."""
    starts, contexts = torch.tensor([0, 1, 2, 13], dtype=torch.int32), torch.tensor([5, 6, 11], dtype=torch.int32)
    positions = torch.tensor([4, 5, *range(11)])
    groups = [Placed(torch.full((13,), -1), torch.zeros(3, 5, dtype=torch.int32)) for _ in range(num_groups)]
    return Batch(torch.zeros(13, dtype=torch.int64), positions, starts, contexts, 2, 11, 11, torch.tensor([0, 1, 12]), groups)


def make(decoder: nn.Module, attached: Sequence[Attached], library: Path, extra: Path) -> None:
    """Trace and compile into `library`; constants that are nobody's parameter or buffer go to `extra`. Raises RuntimeError."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about its own code
        program = traced(decoder, attached)
        part = library.with_name(f"part-{library.name}")
        options = {"aot_inductor.package_constants_in_so": False}
        try:
            torch._inductor.aoti_compile_and_package(program, package_path=str(part), inductor_configs=options)
        except Exception as error:  # no compiler, or one that fails: many types
            raise RuntimeError(f"{type(decoder).__name__} cannot be compiled: {str(error).splitlines()[0]}") from error
    torch.save({name: value for name, value in program.constants.items() if isinstance(value, Tensor)}, extra)
    part.replace(library)


def key_of(decoder: nn.Module, config: Any, attached: Sequence[Attached]) -> str:
    """A name for the library: all that its code depends on, and no weight."""
    import transformers

    fields = {name: value for name, value in config.to_dict().items() if name not in ("_name_or_path", "transformers_version")}
    weights = [(name, str(t.dtype), tuple(t.shape)) for name, t in weights_of(decoder).items()]
    pools = [(a.spec, a.pool.block_size, [(str(t.dtype), tuple(t.shape[1:])) for t in a.pool.tensors]) for a in attached]
    sources = [Path(str(module.__file__)).read_text() for module in _sources()]
    versions = torch.__version__, transformers.__version__, torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()
    said = json.dumps(fields, sort_keys=True, default=str)
    parts = (type(decoder).__qualname__, said, weights, pools, sources, versions, _cpu())
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:20]


def _sources() -> list[Any]:
    """Our files whose code ends up in a library."""
    import sys

    from . import linear, passes
    from .attention import cpu

    return [sys.modules[__name__], passes, linear, interface, cpu]


def _cpu() -> list[str]:
    """The instructions that the compiler may have used."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
    return sorted(next((line.split(":")[1].split() for line in lines if line.startswith("flags")), []))
