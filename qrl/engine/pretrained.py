"""Load checkpoint folders with transformers, and refuse those that it would load wrongly.

transformers fills missing weights with random numbers and drops weights that the model of config.json lacks; vLLM
ignores such biases. Neither raises, and a study would measure another model than the one it was given.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from qrl import checkpoint, names
from qrl.errors import BadInput

if TYPE_CHECKING:
    import torch
    from transformers import BitsAndBytesConfig, PreTrainedModel

_CODES_PER_BYTE = 4  # codes of two bits, the smallest
_SLACK = 1 << 20  # parameters that a small file may lack
# What model classes raise over a config that they cannot build.
_UNFIT = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, AssertionError, RuntimeError)


def load(path: Path, **options) -> PreTrainedModel:
    """Return a folder's model, with every weight read from the folder and none of its code executed.

    `checkpoint.check` accepts the folder; `options` are dtype, device and quantization for `from_pretrained`.

    Raises:
        BadInput: as `check_fit`, or a weight is missing, of another size, or left over.
    """
    from transformers import AutoModelForCausalLM

    check_fit(path)
    options |= {"trust_remote_code": False, "use_safetensors": True}
    options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}  # reported below, by name
    try:
        model, loading = AutoModelForCausalLM.from_pretrained(path, **options)
    except _UNFIT as error:
        raise BadInput(f"{path} cannot be loaded by transformers: {_reason(error)}.") from error
    for name, *sizes in sorted(loading["mismatched_keys"]):
        stored, expected = (" × ".join(map(str, size)) or "a number" for size in sizes)
        misfit = f"{path} holds {name} as {stored}, but its config.json makes it {expected}"
        raise BadInput(f"{misfit}: copy config.json and weights from the same model.")
    for name in sorted(loading["missing_keys"]):
        lacking = f"{path} lacks {name}, which would be filled with random numbers"
        raise BadInput(f"{lacking}: copy or save the whole model again.")
    _refuse_left_over(path, loading["unexpected_keys"])
    _tie(model)
    return model


def _tie(model: PreTrainedModel) -> None:
    """Tie the head to the embedding where config.json does; `checkpoint.head` has shown that only their dtypes differ.

    transformers would compute with the stored head, and store it again beside `tie_word_embeddings: true`.
    """
    output, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if not model.config.tie_word_embeddings or output is None or output.weight is embedding.weight:
        return
    model.tie_weights()
    model.all_tied_weights_keys = model.get_expanded_tied_weights_keys(all_submodels=True)


def check_fit(path: Path, *, for_transformers: bool = True) -> None:
    """Check a folder's weights against the model that its config.json makes, without reading or allocating any.

    Args:
        path: a folder that `checkpoint.check` accepts, quantized or not.
        for_transformers: whether transformers will load it. Otherwise an architecture without a language model in
            transformers, such as mistral3 or qwen2_vl, is left to the engine.

    Raises:
        BadInput: transformers does not know the architecture or cannot build config.json, the model has more parameters
            than the files could hold, they hold a bias that it lacks, which vLLM would ignore, or `architectures`, by
            which vLLM chooses a class, names another class than transformers chooses.
    """
    import torch
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM

    if not for_transformers:
        model_type = checkpoint.config(path).get("model_type")
        if model_type not in CONFIG_MAPPING or CONFIG_MAPPING[model_type] not in MODEL_FOR_CAUSAL_LM_MAPPING:
            return
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # each architecture's class raises errors of its own
        raise BadInput(f"{path / 'config.json'} cannot be loaded by transformers: {_reason(error)}.") from error
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except _UNFIT as error:
        raise BadInput(f"{path} cannot be loaded by transformers: {_reason(error)}.") from error
    settings = checkpoint.config(path)
    architectures = settings.get("architectures")
    model_class = type(model).__name__
    if architectures and set(architectures) != {model_class}:
        raise BadInput(
            f"{path / 'config.json'} is a {config.model_type}, which transformers loads as {model_class}, but its "
            f"architectures are {architectures}, and vLLM goes by them: expected [{model_class!r}]."
        )

    entries = checkpoint.entries(path)
    parameters = sum(weight.numel() for weight in model.parameters())
    stored_bytes = sum(entry.bytes for entry in entries.values())
    if parameters > _CODES_PER_BYTE * stored_bytes + _SLACK:  # transformers would allocate what is missing
        raise BadInput(
            f"{path / 'config.json'} makes a model of {parameters:,} parameters, which {stored_bytes:,} bytes of "
            "weights cannot hold: copy both from the same model."
        )

    model_names = set(model.state_dict())
    biases = [name for name in entries if name.endswith(".bias") and name not in model_names]
    biases = [name for name in biases if f"{name.removesuffix('bias')}weight" in model_names]
    if (settings.get("quantization_config") or {}).get("quant_method") == "gptq":
        # AutoGPTQ stores a bias of zeros for linears without one: nothing is lost.
        biases = [name for name, values in checkpoint.tensors(path, biases) if values.any()]
    _refuse_left_over(path, biases)


def _refuse_left_over(path: Path, names: Iterable[str]) -> None:
    for name in sorted(names):
        raise BadInput(
            f"{path} holds {name}, which a model of its config.json lacks and would lose: copy config.json and weights "
            "from the same model."
        )


def bitsandbytes(scheme: str, compute: torch.dtype) -> BitsAndBytesConfig:
    """Return how bitsandbytes packs linears: `nf4` with double quantization, unpacked to `compute`, or `int8`."""
    from transformers import BitsAndBytesConfig

    if scheme == names.INT8:
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=compute
    )


def skeleton(config: dict) -> PreTrainedModel:
    """Return the model of a config.json, without weights.

    Raises:
        BadInput: transformers cannot build it.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), trust_remote_code=False)
    except Exception as error:  # each architecture's class raises errors of its own
        model = f"a language model '{config.get('model_type')}' from its config.json"
        raise BadInput(f"transformers cannot build {model} ({_reason(error)}): use another model.") from None


def _reason(error: Exception) -> str:
    """Return the first sentence of an error, on one line."""
    return " ".join(str(error).split()).partition(". ")[0].rstrip(".") or type(error).__name__
