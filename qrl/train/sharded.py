"""An adapter that FSDP lays out over several processes, part by part: what PEFT and FSDP do not agree on."""

from __future__ import annotations

import dataclasses
import functools

PART = "_fsdp_wrapped_module"  # what FSDP puts into the names of modules, and leaves out of those of weights


def prepare(trainer) -> None:
    """Lets an adapter be trained, written and gone on with under FSDP; before the trainer lays the model out.

    Args:
        trainer: TRL's, whose model is a PEFT model.
    """
    _cast_between_parts(trainer.accelerator.state.fsdp_plugin)
    name_as_whole()


def _cast_between_parts(plugin) -> None:
    """Lets each part that FSDP wraps take its inputs in the dtype that it computes in: PEFT casts them to that of its masters."""
    if plugin.mixed_precision_policy is not None:
        plugin.mixed_precision_policy = dataclasses.replace(plugin.mixed_precision_policy, cast_forward_inputs=True)


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
