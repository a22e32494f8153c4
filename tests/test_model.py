"""settings/model.py: what config.json says, and what is refused."""

from __future__ import annotations

import json
import re

import pytest

from ascend_rl.settings.model import PUBLISHED, Model, published
from ascend_rl.settings.switch import CannotWork

MOE = PUBLISHED["qwen3-235b-a22b"]


@pytest.mark.parametrize("name", PUBLISHED)
def test_fields_are_those_of_hugging_face(name):
    from transformers import AutoConfig

    theirs, model = AutoConfig.for_model(**PUBLISHED[name]), Model.named(name)
    assert model.name == name and model.kind == theirs.model_type and not model.quantized
    assert (model.layers, model.hidden) == (theirs.num_hidden_layers, theirs.hidden_size)
    assert (model.heads, model.kv_heads) == (theirs.num_attention_heads, theirs.num_key_value_heads)
    assert model.head_dim == getattr(theirs, "head_dim", theirs.hidden_size // theirs.num_attention_heads)
    assert (model.vocabulary, model.tied) == (theirs.vocab_size, theirs.tie_word_embeddings)
    if model.experts:
        assert (model.experts, model.ffn) == (theirs.num_experts, theirs.moe_intermediate_size)
        assert model.experts_per_token == theirs.num_experts_per_tok
    else:
        assert model.ffn == theirs.intermediate_size
    assert (model.qkv_bias, model.qk_norm) == ((True, False) if name.startswith("qwen2.5") else (False, True))


def test_the_same_from_a_name_a_file_and_a_directory(tmp_path):
    file = tmp_path / "config.json"
    extra = {"max_position_embeddings": 40960, "torch_dtype": "float32", "quantization_config": {"bits": 8}}
    file.write_text(json.dumps(MOE | extra))
    model = Model.load(str(file))
    assert model == Model.load(f"{tmp_path}/config.json") and model.name == str(file)
    assert Model.load(str(tmp_path)) == Model.from_path(tmp_path) == model
    assert (model.positions, model.dtype, model.quantized) == (40960, "float32", True)
    named = Model.load("Qwen3-235B-A22B")
    assert (named.positions, named.dtype, named.quantized) == (0, "bfloat16", False)
    assert (model.layers, model.ffn) == (named.layers, named.ffn) == (94, 1536)


@pytest.mark.parametrize(
    "change,message",
    [
        ({"model_type": "llama"}, "model_type 'llama' is not supported, only qwen2, qwen3, qwen3_moe"),
        ({"num_hidden_layers": None}, "num_hidden_layers must be a positive integer, it is None"),
        ({"vocab_size": 0}, "vocab_size must be"),
        ({"hidden_size": True}, "hidden_size must be"),
        ({"num_experts": "128"}, "num_experts must be"),
        ({"num_experts_per_tok": None}, "num_experts_per_tok must be"),
        ({"num_key_value_heads": 3}, "64 attention heads cannot share 3 key-value heads"),
        ({"mlp_only_layers": [0]}, "layers without experts"),
        ({"decoder_sparse_step": 2}, "layers without experts"),
    ],
)
def test_what_would_be_misunderstood_is_refused(change, message):
    with pytest.raises(CannotWork, match=f"^here: .*{re.escape(message)}"):
        Model.from_config(MOE | change, "here")


def test_a_dense_model_may_leave_out_what_is_for_experts():
    config = PUBLISHED["qwen3-8b"] | {"decoder_sparse_step": 2, "attention_bias": True, "head_dim": None}
    model = Model.from_config(config)
    assert model.experts == model.experts_per_token == 0 and model.qkv_bias and model.head_dim == 128
    assert Model.from_config(MOE | {"head_dim": None}).head_dim == 4096 // 64


def test_transformers_5_calls_experts_local_ones():
    config = dict(PUBLISHED["qwen3-30b-a3b"])
    config["num_local_experts"] = config.pop("num_experts")
    assert Model.from_config(config, "qwen3-30b-a3b") == Model.named("qwen3-30b-a3b")


def test_of_any_kind_heads_layers_and_experts_are_read():
    config = {key: value for key, value in MOE.items() if key not in ("num_experts", "num_key_value_heads")}
    model = Model.from_config(config | {"model_type": "deepseek_v3", "n_routed_experts": 256}, kinds=())
    assert (model.layers, model.heads, model.kv_heads, model.experts) == (94, 64, 64, 256)
    llama = {"model_type": "llama", "attention_bias": False}
    assert Model.from_config(PUBLISHED["qwen3-8b"] | llama, kinds=()).experts == 0
    assert Model.from_config(MOE | {"mlp_only_layers": [0]}, kinds=()).experts == 128


def test_what_cannot_be_read_is_said(tmp_path):
    with pytest.raises(CannotWork, match="'qwen9' is neither a file nor one of qwen3-235b-a22b, "):
        Model.load("qwen9")
    with pytest.raises(CannotWork, match="'qwen9'; the published models are qwen3-235b-a22b, "):
        Model.named("qwen9")
    with pytest.raises(CannotWork, match="config.json cannot be read: .*give a Hugging Face model directory"):
        Model.load(str(tmp_path))
    for text, message in (("{", "cannot be read"), ("[]", "is not a JSON object")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(CannotWork, match=message):
            Model.load(str(tmp_path))


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_directory_is_recognised_by_its_name(name):
    for path in (f"/data/{name.upper()}-Instruct", f"hub/{name.replace('-', '_')}", f"{name}-2507/"):
        assert published(path) == name
    assert published(f"{name}5") is published("/qwen3-8b/other") is None
