"""What the KV dtype and 8-bit weights do to a model's outputs, beside the same model with weights and KV in fp32.

Prompts are real ones: `--prompts FILE`, else the first short ones of ShareGPT where the package is installed (extra `data`),
else texts.jsonl, a dozen written for this. The reference (fp32, C++ attention) answers each greedily, up to `--tokens`; then
every row of the table is told to say the same, token by token, by the engine that serves (prompt as a chunk, then decode
steps; paged KV with prefix cache), and its distributions are compared at those positions:

kl: Kullback-Leibler divergence from the reference's distribution to the row's, nats per token; kl_ratio: over that of bf16 KV.
same: share of positions where the likeliest token is the reference's. nll: by how much the negative log-likelihood of the
reference's answer rises, nats per token; answer_nll: the same of the recorded answer's beginning, which a person saw. Then the
row answers freely: equal is the share of answers that are the reference's, agreed the mean number of tokens before the first
difference (of an equal answer, all). kv_bytes: of a token, all layers.

Figures are `NAME_MODEL_ROW`, means over prompts, each counted once however long its answer is; spread is over prompts. `fp32`
is the reference run once more, `int8_torch` has the same KV dtype in plain torch operations: both check the measurement. No
time is measured; all rows take a quarter of an hour on two cores, and --kinds and --skip split that.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from report import report
from torch import Tensor

from lengthwise.engine.native.clock import WallClock
from lengthwise.engine.native.engine import NativeEngine
from lengthwise.engine.native.generate import Answers
from lengthwise.engine.native.loading import load_model, smollm2
from lengthwise.engine.native.names import name_pieces
from lengthwise.engine.native.sampling import Row, Sampled, Sampler
from lengthwise.engine.native.tiny import tiny
from lengthwise.sched import Event, EventKind, Request, Scheduler, pause, serve
from lengthwise.sched.batching import Chunked
from lengthwise.sched.kv import Prefix
from lengthwise.sched.policies import FCFS
from lengthwise.sched.rehearsal import Script

BLOCK, TOGETHER = 16, 32  # tokens; prompts in one batch
HERE = Path(__file__).parent
Samples = dict[str, list[float]]


class Kind(NamedTuple):
    """A row of the table: dtype of the model as loaded, of its linear layers, of its KV, and the attention backend."""

    kv: str
    attention: str = "cpu"
    model: str = "fp32"
    linears: str = "auto"


KINDS = {
    "fp32": Kind("fp32"),
    "bf16": Kind("bf16"),
    "fp16": Kind("fp16"),
    "fp8": Kind("fp8"),
    "int8": Kind("int8"),
    "int8_torch": Kind("int8", "torch"),
    "int8_linears": Kind("fp32", linears="int8"),  # whose inputs are bf16
    "bf16_model": Kind("bf16", model="bf16"),  # as served unless something else is asked for
    "int8_model": Kind("int8", model="bf16", linears="int8"),
}


class Text(NamedTuple):
    """Token ids of a prompt and of the beginning of the answer that was recorded with it."""

    prompt: list[int]
    answer: list[int]


@dataclass
class Ask:
    """A prompt to be answered, freely and up to `most` tokens, or with the tokens `told`. see: is shown the place in the answer
    and the log-probabilities (V,) there."""

    prompt: Sequence[int]
    most: int = 0
    told: Sequence[int] | None = None
    see: Callable[[int, Tensor], None] | None = None


class Telling(Sampler):
    """Greedy, but for the requests that are told what to say."""

    def __init__(self, vocab_size: int, asks: Mapping[int, Ask]) -> None:
        super().__init__(vocab_size)
        self.asks = asks

    def sample(self, logits: Tensor, rows: Sequence[Row], best: tuple[list[int], dict[int, str]] | None = None) -> Sampled:
        sampled = super().sample(logits, rows, best)
        for i, row in enumerate(rows):
            ask, place = self.asks[row.request.rid], row.num_output  # type: ignore[attr-defined]
            if ask.see is not None:
                ask.see(place, logits[i, : self.vocab_size].log_softmax(-1))
            if ask.told is not None:
                sampled.token_ids[i] = ask.told[place]
        return sampled


def answers(engine: NativeEngine, rounds: Sequence[Sequence[Ask]]) -> list[list[list[int]]]:
    """What each ask got. Those of a later round find the prompts of an earlier one in the prefix cache."""
    asks = dict(enumerate(itertools.chain(*rounds)))
    for ask in asks.values():
        ask.most = ask.most if ask.told is None else len(ask.told)
    kv = Prefix(BLOCK * sum(-(-(len(ask.prompt) + ask.most) // BLOCK) for ask in asks.values()), BLOCK, 0.0)
    kv.use_hashes(BLOCK)
    clock, num_seqs = WallClock(), max(map(len, rounds))
    executor = engine.executor(kv, clock, max_num_seqs=num_seqs)
    executor._sampler = Telling(engine.model.vocab_size, asks)
    taken, rid = Answers(executor), 0
    for together in rounds:
        scheduler = Scheduler(
            FCFS(), Chunked(), kv, pause(), max_num_seqs=num_seqs, token_budget=2048, max_model_len=engine.model.max_positions
        )
        requests = []
        for ask in together:
            names = name_pieces(ask.prompt, BLOCK)
            requests.append(Request(rid, 0.0, len(ask.prompt), ask.most, prompt_ids=ask.prompt, block_hashes=names))
            rid += 1
        serve(Script(Event(0.0, EventKind.ARRIVAL, r) for r in requests), scheduler, executor, clock, taken)
    engine.model.detach()
    got = iter(range(rid))
    return [[taken.by_rid[next(got)].token_ids for _ in together] for together in rounds]


class Likelihood:
    """Adds up the negative log-likelihood (nats) of `tokens`."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens, self.total = tokens, 0.0

    def __call__(self, place: int, logprobs: Tensor) -> None:
        self.total -= float(logprobs[self.tokens[place]])

    @property
    def mean(self) -> float:
        return self.total / len(self.tokens)


class Kept:
    """The reference's log-probabilities at every place of its greedy answer, and the answer's negative log-likelihood."""

    def __init__(self) -> None:
        self.logprobs: list[Tensor] = []
        self.total = 0.0

    def __call__(self, place: int, logprobs: Tensor) -> None:
        self.logprobs.append(logprobs)
        self.total -= float(logprobs.max())


class Compared:
    """Compares distributions with those of the reference, where it said `tokens`."""

    def __init__(self, kept: Kept, tokens: Sequence[int]) -> None:
        self.kept, self.likelihood = kept, Likelihood(tokens)
        self.kl, self.same = 0.0, 0

    def __call__(self, place: int, logprobs: Tensor) -> None:
        theirs = self.kept.logprobs[place]
        # both sum to 1: with the (zero) difference of the sums every term is >= 0, and rounding cannot make the sum negative
        apart = (logprobs - theirs).double()
        self.kl += float((theirs.double().exp() * (apart.exp() - 1 - apart)).sum())
        self.same += int(logprobs.argmax()) == int(theirs.argmax())
        self.likelihood(place, logprobs)


class Reference:
    """What the fp32 engine says to `texts`."""

    def __init__(self, engine: NativeEngine, texts: Sequence[Text], most: int) -> None:
        self.texts, self.most = texts, most
        self.kept = [Kept() for _ in texts]
        self.recorded = [Likelihood(text.answer) for text in texts]
        free = [Ask(text.prompt, most, see=kept) for text, kept in zip(texts, self.kept, strict=True)]
        self.said, _ = answers(engine, [free, self.asks_recorded(self.recorded)])

    def asks_recorded(self, seen: Sequence[Likelihood]) -> list[Ask]:
        pairs = zip(self.texts, seen, strict=True)
        return [Ask(text.prompt, told=text.answer, see=see) for text, see in pairs if text.answer]

    def compare(self, engine: NativeEngine) -> Samples:
        """By name of the figure, a number for each prompt (those with a recorded answer)."""
        seen = [Compared(kept, said) for kept, said in zip(self.kept, self.said, strict=True)]
        recorded = [Likelihood(text.answer) for text in self.texts]
        told = [Ask(text.prompt, told=said, see=see) for text, said, see in zip(self.texts, self.said, seen, strict=True)]
        free = [Ask(text.prompt, self.most) for text in self.texts]
        got = answers(engine, [told, [*free, *self.asks_recorded(recorded)]])[1]
        lens = [len(said) for said in self.said]
        return {
            "kl": [see.kl / n for see, n in zip(seen, lens, strict=True)],
            "same": [see.same / n for see, n in zip(seen, lens, strict=True)],
            "nll": [(see.likelihood.total - k.total) / n for see, k, n in zip(seen, self.kept, lens, strict=True)],
            "answer_nll": [r.mean - own.mean for r, own in zip(recorded, self.recorded, strict=True) if own.tokens],
            "equal": [float(answer == said) for answer, said in zip(got, self.said, strict=False)],
            "agreed": [float(agreed(answer, said)) for answer, said in zip(got, self.said, strict=False)],
        }


def agreed(a: Sequence[int], b: Sequence[int]) -> int:
    """Tokens before the first difference."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class Engines:
    """Engines by Kind, made when asked for; those that want the same weights share a model."""

    def __init__(self, load: Callable[[str], Any]) -> None:
        self._load = load
        self._models: dict[tuple[str, str], Any] = {}
        self._engines: dict[Kind, NativeEngine] = {}

    def of(self, kind: Kind) -> NativeEngine:
        if kind not in self._engines:
            weights = kind.model, kind.linears
            if weights not in self._models:
                self._models[weights] = self._load(kind.model)
            model = self._models[weights]
            self._engines[kind] = NativeEngine(model, attention=kind.attention, kv_dtype=kind.kv, linears=kind.linears)
        return self._engines[kind]


def loader(source: str) -> tuple[str, Callable[[str], Any]]:
    """What figures call the model, and a function that loads it in a dtype."""
    if source == "tiny":
        return "tiny", lambda dtype: tiny(dtype=dtype, num_hidden_layers=4)
    if source == "smollm2":
        return source, lambda dtype: smollm2(dtype, verify=False)
    name = "".join(c if c.isalnum() else "_" for c in Path(source).stem.lower())
    return name, lambda dtype: load_model(source, dtype, verify=False)


def read_texts(args: argparse.Namespace, model: Any) -> list[Text]:
    """Those asked for, encoded; random ids for a model without a tokenizer. Raises ValueError when there are none."""
    if model.tokenizer is None:
        rng = np.random.default_rng(0)
        lens = rng.integers(8, 48, args.num_prompts)
        whole = [rng.integers(0, model.vocab_size, n + args.tokens).tolist() for n in lens]
        print(f"prompts: {len(whole)} of random token ids")
        return [Text(ids[:n], ids[n:]) for ids, n in zip(whole, lens, strict=True)]
    source, pairs = sourced(args.prompts)
    texts: list[Text] = []
    for prompt, answer in pairs:
        if len(prompt) > 8 * args.max_prompt:  # characters: not worth encoding
            continue
        ids = model.encode_chat(prompt)
        if len(ids) <= args.max_prompt:
            said = itertools.takewhile(lambda token: token not in model.eos_ids, model.encode(answer))
            texts.append(Text(ids, list(itertools.islice(said, args.tokens))))
        if len(texts) == args.skip + args.num_prompts:
            break
    del texts[: args.skip]
    if not texts:
        raise ValueError(f"{source} has no prompt of at most {args.max_prompt} tokens after the first {args.skip}")
    lens = [len(text.prompt) for text in texts]
    print(
        f"prompts: {len(texts)} of {source}, chat template included {min(lens)} to {max(lens)} tokens, mean {np.mean(lens):.0f}"
    )
    return texts


def sourced(path: Path | None) -> tuple[str, Iterable[tuple[str, str]]]:
    """A name, and (prompt, recorded answer) in order; the answer is "" where there is none."""
    if path is None:
        from lengthwise.experiments.workloads.sharegpt import packaged

        try:
            return "ShareGPT, first turns", sharegpt(packaged())
        except FileNotFoundError:
            path = HERE / "texts.jsonl"
    lines = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
    return path.name, ((line["prompt"], line.get("answer", "")) for line in lines)


def sharegpt(file: Path) -> Iterator[tuple[str, str]]:
    from lengthwise.experiments.workloads.json_array import entries
    from lengthwise.experiments.workloads.sharegpt import first_pairs

    return ((pair.prompt, pair.answer) for pair in first_pairs(entries(file, Counter()), Counter(), Counter()))


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    name, load = loader(args.model)
    engines = Engines(load)
    reference = engines.of(KINDS["fp32"])
    texts = read_texts(args, reference.model)
    found: dict[str, Samples] = {kind: {} for kind in args.kinds}
    own: Samples = {}
    for start in range(0, len(texts), TOGETHER):
        there = Reference(reference, texts[start : start + TOGETHER], args.tokens)
        own.setdefault("len", []).extend(float(len(said)) for said in there.said)
        own.setdefault("answer_nll", []).extend(seen.mean for seen in there.recorded if seen.tokens)
        for kind in args.kinds:
            for figure, values in there.compare(engines.of(KINDS[kind])).items():
                found[kind].setdefault(figure, []).extend(values)
    samples = {f"reference_{figure}_{name}": values for figure, values in own.items() if values}
    for kind, figures in found.items():
        figures["kv_bytes"] = [float(engines.of(KINDS[kind]).kv_bytes_per_token)]
        if "bf16" in found and kind != "bf16":
            figures["kl_ratio"] = [statistics.fmean(figures["kl"]) / statistics.fmean(found["bf16"]["kl"])]
        samples |= {f"{figure}_{name}_{kind}": values for figure, values in figures.items() if values}
    report(samples, args.json, centre=statistics.fmean)
    table(found)


def table(found: Mapping[str, Samples]) -> None:
    """Print means, and of kl its standard error over prompts."""
    columns = ["kl", "same", "nll", "answer_nll", "equal", "agreed", "kv_bytes"]
    print(f"\n{'':14}" + "".join(f"{column:>12}" for column in columns) + "   +- of kl")
    for kind, figures in found.items():
        cells = [f"{statistics.fmean(figures[c]):.4g}" if figures.get(c) else "" for c in columns]
        kl = figures["kl"]
        error = f"   {statistics.stdev(kl) / math.sqrt(len(kl)):.2g}" if len(kl) > 1 else ""
        print(f"{kind:14}" + "".join(f"{cell:>12}" for cell in cells) + error)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write machine, commit, n, figures and spread here")
    parser.add_argument("--model", default="smollm2", help="smollm2, tiny, or a folder, .gguf file or hub id")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), metavar="ROW", help=" ".join(KINDS))
    parser.add_argument("--prompts", type=Path, help='JSON lines of {"prompt": text, "answer": text}, the answer optional')
    parser.add_argument("--num-prompts", type=int, default=96)
    parser.add_argument("--skip", type=int, default=0, help="leave out so many prompts first")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer, at most")
    parser.add_argument("--max-prompt", type=int, default=384, help="leave out prompts of more tokens")
    parser.add_argument("--threads", type=int, help="of the CPU; as torch has them")
    parser.add_argument("--quick", action="store_true", help="four prompts and eight tokens, to see that it works")
    parser.add_argument("--tiny", action="store_true", help="a random model made in place, which has no texts")
    args = parser.parse_args(argv)
    if args.quick:
        args.num_prompts, args.tokens = 4, 8
    if args.tiny:
        args.model = "tiny"
    return args


if __name__ == "__main__":
    main()
