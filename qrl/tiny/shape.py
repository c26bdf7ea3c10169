"""The shape of a model to make: its architecture, sizes and vocabulary, checked before anything is computed."""

from dataclasses import dataclass, replace

from qrl.errors import BadInput

TYPES = ("qwen2", "qwen3", "llama")
LONGEST = 16_384  # most positions
SMALLEST_VOCABULARY = 320  # 256 bytes, the markers, and some merges


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder; the defaults are qrl-tiny's, and those that are None follow from `hidden`."""

    type: str = "qwen2"  # one of `TYPES`: the architecture that transformers, TRL and vLLM load
    layers: int = 4
    hidden: int = 256
    heads: int | None = None  # query heads; None: one for 64 channels
    kv_heads: int | None = None  # key and value heads, which divide `heads`; None: half of them, or one
    intermediate: int | None = None  # width of the feed-forward part; None: twice `hidden`
    vocab: int = 512  # rows of the embedding; a tokenizer that learns fewer tokens leaves the rest unused
    positions: int = 512  # longest text, in tokens
    untied: bool = False  # an output head of its own, instead of the embedding's weights

    def whole(self) -> "Shape":
        """Return the shape with every size set.

        Raises:
            BadInput: sizes are out of bounds or do not divide each other.
        """
        heads = self.heads
        if heads is None:
            heads = max(self.hidden // 64, 1)
        kv_heads = self.kv_heads
        if kv_heads is None:
            kv_heads = heads // 2 if heads % 2 == 0 else 1
        intermediate = self.intermediate
        if intermediate is None:
            intermediate = 2 * self.hidden

        sizes = {
            "layers": self.layers,
            "hidden": self.hidden,
            "heads": heads,
            "kv-heads": kv_heads,
            "intermediate": intermediate,
        }
        for name, size in sizes.items():
            if size < 1:
                raise BadInput(f"{name} is {size}: expected a size of at least 1.")
        if self.type not in TYPES:
            raise BadInput(f"There is no type '{self.type}': expected one of {', '.join(TYPES)}.")
        if self.hidden % heads or self.hidden // heads % 2:
            raise BadInput(f"{heads} heads do not divide hidden {self.hidden} into even parts: give a divisor of it.")
        if heads % kv_heads:
            raise BadInput(f"{kv_heads} kv-heads do not divide {heads} heads: give a divisor of it.")
        if self.vocab < SMALLEST_VOCABULARY:
            raise BadInput(f"vocab is {self.vocab}: expected at least {SMALLEST_VOCABULARY} tokens.")
        if not 64 <= self.positions <= LONGEST:
            raise BadInput(f"positions is {self.positions}: expected 64 to {LONGEST}.")
        return replace(self, heads=heads, kv_heads=kv_heads, intermediate=intermediate)


def new_model(shape: Shape, tokens):
    """Return a model of a whole shape with random weights in fp32 and the tokenizer's end and padding tokens."""
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    special = {"eos_token_id": tokens.eos_token_id, "pad_token_id": tokens.pad_token_id}
    sizes = {
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "max_position_embeddings": shape.positions,
    }
    if shape.type != "qwen2":  # Qwen2's is always hidden / heads
        sizes["head_dim"] = shape.hidden // shape.heads
    config = AutoConfig.for_model(
        shape.type,
        **sizes,
        tie_word_embeddings=not shape.untied,
        bos_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        **special,
    )
    model = AutoModelForCausalLM.from_config(config)
    model.generation_config = GenerationConfig(**special)
    return model
