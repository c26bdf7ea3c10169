"""Reconcile FSDP, PEFT and transformers, where several processes hold parts of one model."""

import dataclasses
import functools

PART = "_fsdp_wrapped_module"  # FSDP adds it to the names of modules, but not of weights


def prepare(trainer, adapter: bool) -> None:
    """Let a model train as one process would train it, before the trainer shards it; `adapter`: it is a PEFT model."""
    plugin = trainer.accelerator.state.fsdp_plugin
    if plugin.mixed_precision_policy is not None:
        plugin.mixed_precision_policy = keep_precision(plugin.mixed_precision_policy, adapter)
    if adapter:
        patch_peft()


def keep_precision(policy, adapter: bool):
    """Return FSDP's mixed-precision policy without the casts that lose precision.

    bf16 changes a rotary position's angle at 1,000 by up to 2 radians. PEFT casts an adapter's inputs to the dtype of
    its weights, so each part casts them back.
    """
    kept = {"buffer_dtype": None} if hasattr(policy, "buffer_dtype") else {}  # FSDP 2 leaves buffers as they are
    return dataclasses.replace(policy, **kept, cast_forward_inputs=policy.cast_forward_inputs or adapter)


def patch_peft() -> None:
    """Let PEFT find an adapter's weights by their names in the whole model: else it silently saves and loads none."""
    import peft
    from peft.tuners import tuners_utils

    prefixes, load = tuners_utils._get_tuner_state_dict_key_prefixes, peft.set_peft_model_state_dict
    if hasattr(load, "__wrapped__"):  # patched before
        return

    @functools.wraps(prefixes)
    def whole_prefixes(*args, **kwargs):
        return {name.replace(f"{PART}.", "") for name in prefixes(*args, **kwargs)}

    @functools.wraps(load)
    def load_whole(model, *args, **kwargs):
        if not hasattr(model, PART):
            return load(model, *args, **kwargs)
        model.check_is_root()  # else the first part that loads weights takes itself for the root
        return load(getattr(model, PART), *args, **kwargs)

    tuners_utils._get_tuner_state_dict_key_prefixes, peft.set_peft_model_state_dict = whole_prefixes, load_whole
