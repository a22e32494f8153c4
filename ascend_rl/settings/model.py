"""The shapes of a model: the one reader of config.json, and the configurations of published checkpoints.

Invariants (tests/test_model.py): each published configuration gives the parameter count of the released
weights (tests/test_memory_plan.py) and the shapes of Hugging Face's model; a configuration that a reader of
shapes would misunderstand is refused, with the file and the field.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from ascend_rl.settings.switch import CannotWork

QWEN = ("qwen2", "qwen3", "qwen3_moe")  # the kinds whose tensors all follow from the fields of Model


def _config(kind: str, hidden: int, layers: int, heads: int, kv_heads: int, ffn: int, **more) -> dict:
    return {
        "model_type": kind,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": ffn,
        "vocab_size": 151936,
        "tie_word_embeddings": False,
        **({} if kind == "qwen2" else {"head_dim": 128, "attention_bias": False}),
        **more,
    }


def _experts(width: int) -> dict:
    sparse = {"decoder_sparse_step": 1, "mlp_only_layers": []}
    return {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": width, **sparse}


_TIED = {"tie_word_embeddings": True}
# What config.json of each published checkpoint says about shapes, with its names. The longest sequence is
# left out: checkpoints of one size differ in it (base, instruct, 2507).
PUBLISHED: dict[str, dict] = {
    "qwen3-235b-a22b": _config("qwen3_moe", 4096, 94, 64, 4, 12288, **_experts(1536)),
    "qwen3-30b-a3b": _config("qwen3_moe", 2048, 48, 32, 4, 6144, **_experts(768)),
    "qwen3-32b": _config("qwen3", 5120, 64, 64, 8, 25600),
    "qwen3-14b": _config("qwen3", 5120, 40, 40, 8, 17408),
    "qwen3-8b": _config("qwen3", 4096, 36, 32, 8, 12288),
    "qwen3-4b": _config("qwen3", 2560, 36, 32, 8, 9728, **_TIED),
    "qwen3-1.7b": _config("qwen3", 2048, 28, 16, 8, 6144, **_TIED),
    "qwen3-0.6b": _config("qwen3", 1024, 28, 16, 8, 3072, **_TIED),
    "qwen2.5-32b": _config("qwen2", 5120, 64, 40, 8, 27648, vocab_size=152064),
    "qwen2.5-7b": _config("qwen2", 3584, 28, 28, 4, 18944, vocab_size=152064),
    "qwen2.5-3b": _config("qwen2", 2048, 36, 16, 2, 11008, **_TIED),
    "qwen2.5-1.5b": _config("qwen2", 1536, 28, 12, 2, 8960, **_TIED),
    "qwen2.5-0.5b": _config("qwen2", 896, 24, 14, 2, 4864, **_TIED),
}


def published(path: str) -> str | None:
    """The name in PUBLISHED of the checkpoint at `path`, by the name of its directory.

    >>> published("/data/Qwen3-235B-A22B-hf"), published("weights/Qwen25-3B-Instruct"), published("my_model")
    ('qwen3-235b-a22b', 'qwen2.5-3b', None)
    """
    name = Path(path).name.lower().replace("_", "-").replace("qwen25", "qwen2.5")
    known = [model for model in PUBLISHED if re.search(rf"{re.escape(model)}(?![\d.])", name)]
    return max(known, key=len, default=None)


def published_positions(path: str) -> int:
    """The longest sequence of a published Qwen3, by its name; 0 for others, which differ within a size.

    >>> published_positions("/data/Qwen3-32B"), published_positions("/data/Qwen3-8B-Base")
    (40960, 32768)
    """
    name = Path(path).name.lower()
    if not (published(path) or "").startswith("qwen3"):
        return 0
    return 262144 if "2507" in name else 32768 if "base" in name else 40960


@dataclass(frozen=True)
class Model:
    """The shapes of a decoder. ``ffn`` is the width of one expert, or of the MLP if ``experts`` is 0."""

    name: str  # for messages: a published name or the path
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    ffn: int
    experts: int = 0
    experts_per_token: int = 0
    tied: bool = False  # the embedding is also lm_head
    qkv_bias: bool = False
    qk_norm: bool = True
    kind: str = "qwen3"  # model_type
    dtype: str = "bfloat16"
    positions: int = 0  # longest sequence, tokens; 0 if not known
    quantized: bool = False

    @classmethod
    def load(cls, text: str) -> Model:
        """A published name, a config.json, or a directory that holds one.

        Raises:
            CannotWork: none of these, or as for `from_config`.
        """
        if text.lower() in PUBLISHED:
            return cls.named(text)
        if not Path(text).expanduser().exists():
            raise CannotWork(f"model '{text}' is neither a file nor one of {', '.join(PUBLISHED)}")
        return cls.from_path(text)

    @classmethod
    def named(cls, name: str) -> Model:
        """A published checkpoint, by its key in PUBLISHED.

        >>> Model.named("Qwen3-8B").layers
        36
        """
        if name.lower() not in PUBLISHED:
            raise CannotWork(
                f"no published model is called '{name}'; the published models are {', '.join(PUBLISHED)}"
            )
        return cls.from_config(PUBLISHED[name.lower()], name.lower())

    @classmethod
    def from_path(cls, path: str | Path, kinds: tuple[str, ...] = QWEN) -> Model:
        """Of a config.json or of the directory that holds it; ``kinds`` as for `from_config`."""
        file = Path(path).expanduser()
        file = file / "config.json" if file.is_dir() else file
        try:
            config = json.loads(file.read_text())
        except (OSError, ValueError) as error:
            raise CannotWork(
                f"{file} cannot be read: {error}; give a Hugging Face model directory"
            ) from error
        return cls.from_config(config, str(file), kinds)

    @classmethod
    def from_config(cls, config: dict, name: str = "config.json", kinds: tuple[str, ...] = QWEN) -> Model:
        """Of the contents of a config.json.

        Args:
            name: where it comes from, for messages.
            kinds: the model types that are accepted; empty: any, for heads, layers and experts only, since
                the tensors of other types do not follow from these fields.

        Raises:
            CannotWork: another model type, a field that is missing or not a positive integer, heads that
                cannot share the key-value heads, or, where ``kinds`` are given, some layers without experts.
        """
        if not isinstance(config, dict):
            raise CannotWork(f"{name} is not a JSON object; give the config.json of a Hugging Face model")
        kind = config.get("model_type")
        if kinds and kind not in kinds:
            raise CannotWork(f"{name}: model_type '{kind}' is not supported, only {', '.join(kinds)}")
        if kind == "qwen3_moe" and "num_local_experts" in config:  # saved by transformers 5
            config = {"num_experts": config["num_local_experts"]} | config
        expert_key = next((key for key in ("num_experts", "n_routed_experts") if config.get(key)), None)
        moe = kind == "qwen3_moe" or (kind not in QWEN and expert_key is not None)
        some_dense = config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1
        if kinds and moe and some_dense:
            raise CannotWork(
                f"{name}: layers without experts (mlp_only_layers, decoder_sparse_step) are not supported"
            )

        def value(key: str) -> int:
            given = config.get(key)
            if type(given) is not int or given < 1:
                raise CannotWork(f"{name}: {key} must be a positive integer, it is {given}")
            return given

        heads, hidden = value("num_attention_heads"), value("hidden_size")
        kv_heads = value("num_key_value_heads") if kinds or "num_key_value_heads" in config else heads
        if heads % kv_heads:
            raise CannotWork(f"{name}: {heads} attention heads cannot share {kv_heads} key-value heads")
        return cls(
            name=name,
            layers=value("num_hidden_layers"),
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=config.get("head_dim") or (128 if kind == "qwen3" else hidden // heads),
            vocabulary=value("vocab_size"),
            ffn=value("moe_intermediate_size" if moe else "intermediate_size"),
            experts=value(expert_key or "num_experts") if moe else 0,
            experts_per_token=value("num_experts_per_tok") if moe else 0,
            tied=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=kind == "qwen2" or bool(config.get("attention_bias", False)),
            qk_norm=kind in ("qwen3", "qwen3_moe"),
            kind=str(kind),
            dtype=str(config.get("dtype") or config.get("torch_dtype") or "bfloat16"),
            positions=config.get("max_position_embeddings") or 0,
            quantized=bool(config.get("quantization_config")),
        )
