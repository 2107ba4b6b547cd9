"""Sizes of the measured models, and models with random weights made from a config: nothing is downloaded.

Bytes and operations of a pass are computed in arithmetic.py. torch is imported inside functions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Shape:
    """Dimensions of a Qwen3 model."""

    name: str
    hidden: int
    layers: int
    heads: int
    key_heads: int
    head_size: int
    inner: int
    vocabulary: int
    is_head_tied: bool = True

    @property
    def layer_matrices(self) -> int:
        """Parameters of one layer's matrices: hidden * D * (2 H + 2 K) + 3 * hidden * inner."""
        attention = self.hidden * self.head_size * (2 * self.heads + 2 * self.key_heads)
        return attention + 3 * self.hidden * self.inner

    @property
    def layer_norms(self) -> int:
        """Parameters of one layer's norms: two of the hidden size, and one each for query and key heads."""
        return 2 * self.hidden + 2 * self.head_size

    @property
    def embedding(self) -> int:
        """Parameters of the embedding, and of the head: vocabulary * hidden."""
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """Number of all parameters; a tied head is the embedding."""
        body = self.layers * (self.layer_matrices + self.layer_norms) + self.hidden
        return body + self.embedding * (1 if self.is_head_tied else 2)


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("tiny", 64, 2, 4, 2, 16, 128, 512),
        Shape("0.6B", 1024, 28, 16, 8, 128, 3072, 151_936),
        Shape("1.7B", 2048, 28, 16, 8, 128, 6144, 151_936),
        Shape("4B", 2560, 36, 32, 8, 128, 9728, 151_936),
    )
}
"""Qwen3's dense models by name, and one shape for the self-check on a CPU."""


def config_of(shape: Shape, *, num_layers: int | None = None, max_positions: int = 40_960) -> Any:
    """The transformers config of `shape`. num_layers: reduces the number of layers."""
    from transformers import AutoConfig

    return AutoConfig.for_model(
        "qwen3",
        hidden_size=shape.hidden,
        num_hidden_layers=num_layers or shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_heads,
        head_dim=shape.head_size,
        intermediate_size=shape.inner,
        vocab_size=shape.vocabulary,
        tie_word_embeddings=shape.is_head_tied,
        max_position_embeddings=max_positions,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        bos_token_id=None,
        eos_token_id=None,
    )


def random_model(config: Any, device: Any) -> Any:
    """A float32 model with transformers' initial weights on `device`, in evaluation mode."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model.eval()


def random_tensors(config: Any, device: Any, dtype: Any) -> dict[str, Any]:
    """Random tensors under the names of a published version; norms are 1, so that nothing overflows."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config, dtype=dtype)
    generator = torch.Generator(device).manual_seed(0)
    tensors = {}
    for name, parameter in empty.named_parameters():
        if parameter.ndim < 2:
            tensors[name] = torch.ones(parameter.shape, dtype=dtype, device=device)
        else:
            drawn = torch.randn(parameter.shape, dtype=dtype, device=device, generator=generator)
            tensors[name] = drawn.mul_(config.initializer_range)
    return tensors
