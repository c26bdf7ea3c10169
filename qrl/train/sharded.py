"""A model that FSDP lays out over several processes, part by part: what it, PEFT and transformers do not agree on."""

from __future__ import annotations

import dataclasses
import functools

PART = "_fsdp_wrapped_module"  # what FSDP puts into the names of modules, and leaves out of those of weights


def prepare(trainer, adapter: bool) -> None:
    """Lets a model be trained as one process would train it, and an adapter be written and gone on with; before the trainer lays the model out.

    Args:
        trainer: TRL's.
        adapter: whether its model is a PEFT model.
    """
    plugin = trainer.accelerator.state.fsdp_plugin
    if plugin.mixed_precision_policy is not None:
        plugin.mixed_precision_policy = arithmetic(plugin.mixed_precision_policy, adapter)
    if adapter:
        name_as_whole()


def arithmetic(given, adapter: bool):
    """FSDP's mixed precision with what must not be rounded left as it is.

    Buffers are the frequencies of rotary positions: bf16 changes each by up to 0.2 %, and so the angle at position 1,000 by up to 2 radians, which no
    other way of training or answering does. PEFT casts the inputs of an adapter to the dtype of its masters; each part casts them to that it computes in.
    """
    return dataclasses.replace(given, buffer_dtype=None, cast_forward_inputs=given.cast_forward_inputs or adapter)


def name_as_whole() -> None:
    """Lets PEFT know an adapter's weights by their names in the whole model: else it writes none of them, and loads none, in silence."""
    import peft
    from peft.tuners import tuners_utils

    prefixes, load = tuners_utils._get_tuner_state_dict_key_prefixes, peft.set_peft_model_state_dict
    if hasattr(load, "__wrapped__"):  # done before
        return

    @functools.wraps(prefixes)
    def named(*given, **more):
        return {name.replace(f"{PART}.", "") for name in prefixes(*given, **more)}

    @functools.wraps(load)
    def loaded(model, *given, **more):
        if not hasattr(model, PART):
            return load(model, *given, **more)
        model.check_is_root()  # else the first of its parts that takes weights takes itself for the whole
        return load(getattr(model, PART), *given, **more)

    tuners_utils._get_tuner_state_dict_key_prefixes, peft.set_peft_model_state_dict = named, loaded
