"""Architectures of language models, by name or from a config.json: parameter count and KV cache per token.

Figures are from the config.json published with each model on huggingface.co. Pure.
"""

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gpuscale.common.errors import InvalidArgumentError

# Name and other names; layers, hidden size, heads, KV heads, size of a head, intermediate size, vocabulary, experts, experts of
# a token. `tied`: the embedding is also the output layer.
_MODELS = """
llama-2-7b                      32  4096  32  32 128 11008  32000   1  1
llama-2-13b                     40  5120  40  40 128 13824  32000   1  1
llama-2-70b                     80  8192  64   8 128 28672  32000   1  1
llama-3.1-8b=llama-3-8b         32  4096  32   8 128 14336 128256   1  1
llama-3.3-70b=llama-3.1-70b=llama-3-70b 80 8192 64 8 128 28672 128256 1 1
llama-3.1-405b                 126 16384 128   8 128 53248 128256   1  1
llama-3.2-1b                    16  2048  32   8  64  8192 128256   1  1 tied
llama-3.2-3b                    28  3072  24   8 128  8192 128256   1  1 tied
mistral-7b                      32  4096  32   8 128 14336  32768   1  1
mistral-nemo-12b=mistral-nemo   40  5120  32   8 128 14336 131072   1  1
mistral-small-24b               40  5120  32   8 128 32768 131072   1  1
mixtral-8x7b                    32  4096  32   8 128 14336  32000   8  2
mixtral-8x22b                   56  6144  48   8 128 16384  32768   8  2
qwen2.5-0.5b                    24   896  14   2  64  4864 151936   1  1 tied
qwen2.5-1.5b                    28  1536  12   2 128  8960 151936   1  1 tied
qwen2.5-3b                      36  2048  16   2 128 11008 151936   1  1 tied
qwen2.5-7b=qwen2-7b             28  3584  28   4 128 18944 152064   1  1
qwen2.5-14b                     48  5120  40   8 128 13824 152064   1  1
qwen2.5-32b                     64  5120  40   8 128 27648 152064   1  1
qwen2.5-72b=qwen2-72b           80  8192  64   8 128 29568 152064   1  1
qwen3-0.6b                      28  1024  16   8 128  3072 151936   1  1 tied
qwen3-1.7b                      28  2048  16   8 128  6144 151936   1  1 tied
qwen3-4b                        36  2560  32   8 128  9728 151936   1  1 tied
qwen3-8b                        36  4096  32   8 128 12288 151936   1  1
qwen3-14b                       40  5120  40   8 128 17408 151936   1  1
qwen3-32b                       64  5120  64   8 128 25600 151936   1  1
qwen3-30b-a3b                   48  2048  32   4 128   768 151936 128  8
qwen3-235b-a22b                 94  4096  64   4 128  1536 151936 128  8
gemma-2-9b                      42  3584  16   8 256 14336 256000   1  1 tied
gemma-2-27b                     46  4608  32  16 128 36864 256000   1  1 tied
phi-3-mini                      32  3072  32  32  96  8192  32064   1  1
phi-4                           40  5120  40  10 128 17920 100352   1  1
"""


@dataclass(frozen=True, slots=True)
class Architecture:
    """A Llama-like decoder: gated MLPs, grouped KV heads, optional experts."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    experts: int = 1
    experts_per_token: int = 1
    tied: bool = field(default=False, kw_only=True)

    @property
    def parameter_count(self) -> int:
        """Weights of embeddings, attention, MLPs and router; norms and biases are less than a thousandth."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        mlp = 3 * self.hidden * self.intermediate * self.experts
        router = self.hidden * self.experts if self.experts > 1 else 0
        return self.layers * (attention + mlp + router) + (1 if self.tied else 2) * self.vocab * self.hidden

    @property
    def kv_values_per_token(self) -> int:
        """Values that a token adds to the KV cache: a key and a value per KV head and layer."""
        return 2 * self.layers * self.kv_heads * self.head_dim


MODELS: Mapping[str, Architecture] = {
    name: made
    for names, *figures in map(str.split, _MODELS.strip().splitlines())
    for made in [Architecture(*map(int, figures[:9]), tied=figures[9:] == ["tied"])]
    for name in names.split("=")
}
_MAKER = re.compile(r"^(?:meta-|mistral-?ai-|deepseek-r1-distill-)")
_EDITION = re.compile(
    r"-(?:instruct|chat|it|hf|base|v\d[\d.]*|\d{4}|\dk|128k|fp8|bf16|awq|gptq|int[48])(?=-|$)"
)


def known(name: str) -> Architecture:
    """The architecture of a model by its name or path, such as `meta-llama/Llama-3.1-8B-Instruct`.

    Raises InvalidArgumentError: the model is unknown; suggests similar names.
    """
    short = _EDITION.sub("", _MAKER.sub("", re.split(r"[/\\]", name.strip().lower().replace("_", "-"))[-1]))
    short = re.sub(
        r"^(llama|qwen|gemma|phi)-?(\d)",
        lambda found: f"{found[1]}{'' if found[1] == 'qwen' else '-'}{found[2]}",
        short,
    )
    if short in MODELS:
        return MODELS[short]
    near = difflib.get_close_matches(short, MODELS, n=3, cutoff=0.5)
    meant = f"did you mean {' or '.join(near)}? Or give" if near else "give"
    raise InvalidArgumentError(
        f"unknown model {name!r}: {meant} its config.json, or parameter_count with dtype", field="model"
    )


def from_config(config: Mapping[str, Any]) -> Architecture:
    """Parse a Hugging Face config.json; for a multimodal model, its text part.

    Raises InvalidArgumentError: a number is missing or invalid; names the key.
    """
    of: Mapping[str, Any] = config.get("text_config") or config

    def number(*keys: str, default: int | None = None) -> int:
        for key in keys:
            value = of.get(key)
            if value is None:
                continue
            if (
                isinstance(value, bool)
                or not isinstance(value, (int, float))
                or not 0 < value < 1e9
                or value % 1
            ):
                raise InvalidArgumentError(
                    f"config: {key} must be a whole number above 0", field=f"config.{key}"
                )
            return int(value)
        if default is None:
            raise InvalidArgumentError(f"config: {keys[0]} is missing", field=f"config.{keys[0]}")
        return default

    if "kv_lora_rank" in of:
        raise InvalidArgumentError(
            "config: multi-head latent attention is not supported", field="config.kv_lora_rank"
        )
    hidden, heads = number("hidden_size"), number("num_attention_heads")
    experts = number("num_local_experts", "num_experts", "n_routed_experts", default=1)
    wide = ("moe_intermediate_size", "intermediate_size") if experts > 1 else ("intermediate_size",)
    return Architecture(
        layers=number("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=number("num_key_value_heads", default=heads),
        head_dim=number("head_dim", default=max(1, hidden // heads)),
        intermediate=number(*wide),
        vocab=number("vocab_size"),
        experts=experts,
        experts_per_token=number("num_experts_per_tok", default=1),
        tied=bool(of.get("tie_word_embeddings", config.get("tie_word_embeddings", False))),
    )


STEP_TOKENS = 8192
"""Most tokens per step: longer prompts are processed in chunks (vLLM's max_num_batched_tokens)."""
USABLE = 0.9
"""Usable share of a GPU's memory for weights, KV cache and activations (vLLM's gpu_memory_utilization)."""
_KV_BYTES, _LOGIT_BYTES, _ACTIVATION_BYTES = 2, 4, 2


@dataclass(frozen=True, slots=True)
class GpuKind:
    """GPUs of one model and size in the fleet: how many in all, and on the node with most."""

    model: str
    memory_bytes: int
    count: int
    on_one_node: int


@dataclass(frozen=True, slots=True)
class Split:
    """How a model is split: each layer over `tensor` GPUs, the layers over `pipeline` groups."""

    tensor: int
    pipeline: int = 1

    @property
    def gpu_count(self) -> int:
        """The number of GPUs."""
        return self.tensor * self.pipeline


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes that a model needs on all its GPUs together."""

    architecture: Architecture
    weights: float
    kv_cache: float
    activations: float

    @property
    def least(self) -> float:
        """Needed while tokens are generated one by one."""
        return self.weights + self.kv_cache

    @property
    def most(self) -> float:
        """Needed to serve it, on GPUs of which a model server uses `USABLE`."""
        return (self.least + self.activations) / USABLE

    def of_each(self, split: Split) -> float:
        """Memory needed per GPU: KV heads are split across GPUs, and repeated beyond their number."""
        of_heads = min(split.tensor, self.architecture.kv_heads)
        cache = self.kv_cache / (of_heads * split.pipeline)
        return (self.weights / split.gpu_count + cache + self.activations / split.tensor) / USABLE

    def split_over(self, gpus: GpuKind) -> Split | None:
        """The smallest split over GPUs of a kind, on one node if possible; None if they are too few."""
        widths = [n for n in range(1, gpus.on_one_node + 1) if self.architecture.heads % n == 0]
        options = [Split(width) for width in widths]
        if widths:
            options += [Split(widths[-1], depth) for depth in range(2, gpus.count // widths[-1] + 1)]
        return next((one for one in options if self.of_each(one) <= gpus.memory_bytes), None)


def footprint(of: Architecture, bytes_of_type: float, context: int, batch: int) -> Footprint:
    """The memory for `batch` sequences of `context` tokens, with KV cache and activations in 16 bits."""
    step = min(context * batch, STEP_TOKENS)
    wide = 2 * of.intermediate * of.experts_per_token + 4 * of.hidden
    return Footprint(
        of,
        weights=of.parameter_count * bytes_of_type,
        kv_cache=float(of.kv_values_per_token * _KV_BYTES * context * batch),
        activations=float(step * wide * _ACTIVATION_BYTES + batch * of.vocab * _LOGIT_BYTES),
    )
