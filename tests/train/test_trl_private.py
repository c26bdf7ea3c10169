"""What qrl.train relies on below the public interfaces of TRL and PEFT; an upgrade that changes it fails here."""

import inspect
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from qrl import checkpoint, tasks, tiny
from qrl.engine import hf
from qrl.recipe import Rollout, Train, Watch
from qrl.tasks import prompt
from qrl.train import Job, distill, grpo, rollout, sharded
from qrl.train.qat.linear import attach
from qrl.train.rollout import slot, sync, vllm_engine

pytestmark = pytest.mark.process

SMALL = Train(steps=2, prompts_per_step=4, generations=2, micro_batch=4, max_completion_tokens=16, save_every=2)


def parameters(function) -> list[str]:
    return list(inspect.signature(function).parameters)


def assigned(cls, name: str) -> bool:
    """Return whether a class's source assigns an attribute of `self`."""
    return f"self.{name} =" in inspect.getsource(cls)


def test_the_link_to_vllm_has_the_methods_that_are_replaced_and_the_attributes_that_are_read():
    from trl.generation.vllm_generation import VLLMGeneration

    assert parameters(VLLMGeneration.generate) == ["self", "prompts", "images", "num_generations", "profiler"], (
        "TRL's VLLMGeneration.generate has other arguments: adapt vllm_link.Link.generate."
    )
    for name in ("_init_vllm", "_iter_named_params", "sync_weights"):
        assert parameters(getattr(VLLMGeneration, name)) == ["self"], (
            f"TRL's VLLMGeneration.{name} is missing or has arguments: adapt vllm_link.Link.{name}."
        )
    passed = {"model", "accelerator", "processing_class", "mode", "server_base_url", "server_timeout", "group_port"}
    passed |= {"max_num_seqs", "repetition_penalty", "temperature", "top_p", "top_k", "min_p", "max_completion_length"}
    passed |= {"logprobs", "generation_kwargs"}
    missing = passed - set(parameters(VLLMGeneration.__init__))
    assert not missing, f"TRL's VLLMGeneration does not accept {missing}: adapt vllm_link.link."
    for name in (
        "model",
        "accelerator",
        "mode",
        "max_num_seqs",
        "enable_sleep_mode",
        "generation_kwargs",
        "logprobs",
        "_dist",
    ):
        assert assigned(VLLMGeneration, name), f"TRL's VLLMGeneration does not set {name}: vllm_link.Link reads it."
    init = inspect.getsource(VLLMGeneration.__init__).rstrip()
    assert init.endswith("self._init_vllm()"), "TRL's VLLMGeneration calls _init_vllm before its attributes are set."
    assert "self._iter_named_params()" in inspect.getsource(VLLMGeneration.sync_weights), (
        "TRL sends a server other weights than those of _iter_named_params: qrl would send weights merged in place."
    )


def test_a_rollout_servers_client_reports_how_the_server_stores_weights():
    from trl.generation.vllm_client import VLLMClient

    assert parameters(VLLMClient.get_server_info) == ["self"], "VLLMClient.get_server_info is missing or has arguments."


def test_weights_that_fsdp_wraps_in_no_layer_can_be_gathered():
    from trl.distributed import DistributedBackend

    assert parameters(DistributedBackend.summon_full_params) == ["self", "module", "kwargs"], (
        "TRL's DistributedBackend.summon_full_params has other arguments: adapt trl.grpo.unsharded."
    )
    assert "is_fsdp" in inspect.getsource(DistributedBackend), (
        "TRL's DistributedBackend has no is_fsdp: adapt vllm_link.Link._iter_named_params."
    )


def test_a_distillation_computes_its_loss_in_one_method_from_last_hidden_states():
    from trl import DistillationTrainer

    assert parameters(DistillationTrainer._compute_loss)[1:] == ["unwrapped_student", "inputs", "num_items_in_batch"], (
        "TRL's DistillationTrainer._compute_loss has other arguments: adapt trl.distillation."
    )
    first = ["unwrapped_model", "input_ids", "attention_mask", "logits_to_keep"]
    assert parameters(DistillationTrainer._get_last_hidden_state)[1:5] == first, (
        "TRL's DistillationTrainer._get_last_hidden_state has other arguments: adapt trl.distillation."
    )
    for name in ("temperature", "_forward_redirection"):
        assert assigned(DistillationTrainer, name), f"TRL's DistillationTrainer does not set {name}."


def test_peft_looks_up_an_adapters_weights_through_the_two_functions_that_are_patched():
    import peft
    from peft.tuners import tuners_utils

    names = parameters(inspect.unwrap(tuners_utils._get_tuner_state_dict_key_prefixes))
    assert names == ["model", "adapter_name"], "PEFT's _get_tuner_state_dict_key_prefixes has other arguments."
    assert "_get_tuner_state_dict_key_prefixes(" in inspect.getsource(tuners_utils.BaseTuner), (
        f"PEFT's tuners do not call the function that {sharded.__name__} patches: FSDP would save an empty adapter."
    )
    assert parameters(inspect.unwrap(peft.set_peft_model_state_dict))[0] == "model"


class FakeEngine:
    """An engine without vLLM: a plain model that is given weights and samples from them."""

    def __init__(self, calls: list[str]) -> None:
        self.calls, self.model, self.asked = calls, None, []
        self.llm_engine = SimpleNamespace(model_config=SimpleNamespace(max_model_len=512))

    def load(self, engine, weights, *, reloads):
        self.calls.append("sync")
        state = {name: weight.float() for name, weight in weights}
        if self.model is None:
            self.model = hf.load(tiny.PATH, "cpu", torch.float32)[0]
        self.model.load_state_dict(state, strict=False)

    def load_adapter(self, engine, adapter):
        self.calls.append("adapter")
        self.base = getattr(self, "base", None) or {key: each.clone() for key, each in self.model.state_dict().items()}
        changed = {f"{name}.weight": self.base[f"{name}.weight"] + up @ down for name, down, up in adapter}
        self.model.load_state_dict(changed, strict=False)

    def generate(self, engine, prompts, *, temperature, max_tokens, more, adapter=None):
        self.calls.append("generate")
        self.asked.append(more["logprobs"])
        completions, logprobs = [], []
        for ids in prompts:
            drawn, scores = [], []
            for _ in range(max_tokens):
                with torch.no_grad():
                    logits = self.model(torch.tensor([[*ids, *drawn]])).logits[0, -1].float() / (temperature or 1)
                token = int(torch.multinomial(logits.softmax(-1), 1) if temperature else logits.argmax())
                drawn.append(token)
                scores.append(float(logits.log_softmax(-1)[token]))
                if token == self.model.generation_config.eos_token_id:
                    break
            completions.append(drawn)
            logprobs.append(scores)
        return completions, logprobs if more["logprobs"] == 0 else [[] for _ in prompts]


@pytest.fixture
def engine(monkeypatch):
    fake = FakeEngine([])
    monkeypatch.setattr(rollout, "check_installed", lambda settings: None)
    monkeypatch.setattr(rollout, "check", lambda *args: None)
    monkeypatch.setattr(vllm_engine, "create", lambda *args, **kwargs: fake)
    monkeypatch.setattr(vllm_engine, "load", fake.load)
    monkeypatch.setattr(vllm_engine, "generate", fake.generate)
    monkeypatch.setattr(slot, "load", fake.load_adapter)
    monkeypatch.setattr(slot, "request", lambda: None)
    return fake


SYNCS = {  # method and rollout.adapter → what the engine is asked in two steps
    ("full", "merged"): ["sync", "generate"] * 2,
    ("lora", "merged"): ["sync", "generate"] * 2,
    ("lora", "slot"): ["sync", "adapter", "generate", "adapter", "generate"],
}


@pytest.mark.slow
@pytest.mark.parametrize(("method", "adapter"), SYNCS)
def test_trl_syncs_once_a_step_samples_from_token_ids_and_logs_the_gap(engine, tmp_path, method, adapter):
    """By effect: the engine's samples have the trainer's own probabilities only if TRL syncs before it samples."""
    settings = SMALL.model_copy(update={"method": method, "learning_rate": 1e-3})
    data = {"base": tiny.PATH, "questions": tasks.load("arithmetic", "train", 16, 0), "task": "arithmetic"}
    where = {"template": "plain", "seed": 0, "device": "cpu", "work": tmp_path / "work", "out": tmp_path / "model"}
    sampling = Rollout(engine="vllm", sleep="off", adapter=adapter)
    done = grpo.run(Job(settings=settings, rollout=sampling, **data, **where))
    assert engine.calls == SYNCS[method, adapter], "TRL no longer syncs the weights once before each rollout."
    history = done.history
    assert history["step"].tolist() == [1, 2] and (history["rollout_sync_s"] > 0).all()
    assert (history["rollout_kl_k3"] < 2e-3).all() and (history["rollout_token_ess"] > 0.99).all(), (
        "The engine's samples do not have the trained model's probabilities: TRL passes weights or tokens otherwise."
    )


@pytest.mark.slow
def test_a_probe_asks_the_engine_and_changes_nothing_that_training_samples(engine, tmp_path):
    settings = SMALL.model_copy(update={"learning_rate": 1e-3, "max_completion_tokens": 32})
    questions = tasks.load("arithmetic", "train", 24, 0)
    data = {"base": tiny.PATH, "questions": questions[:16], "task": "arithmetic", "template": "plain", "seed": 0}

    def trained(name: str, **changes):
        torch.manual_seed(0)
        where = {"device": "cpu", "work": tmp_path / name / "work", "out": tmp_path / name / "model"}
        return grpo.run(Job(settings=settings, rollout=Rollout(engine="vllm", sleep="off"), **data, **where, **changes))

    plain = trained("plain")
    engine.calls.clear()
    engine.asked.clear()
    probed = trained("probed", watch=Watch(probe_every=1, probe_n=8), probe_questions=questions[16:])
    assert engine.calls == ["sync", "generate"] * 5  # two rollouts, three probes: transformers answered none
    assert engine.asked == [None, 0, None, 0, None]  # a probe reads no log-probabilities
    assert checkpoint.digest(probed.path) == checkpoint.digest(plain.path)
    assert (probed.history["rollout_generate_s"] > 0).all()
    model, tokens = hf.load(tiny.PATH, "cpu", torch.float32)
    prompts = [prompt.render(tokens, question.question, "plain") for question in questions[16:]]
    own = hf.generate(model, tokens, prompts, max_new_tokens=32, batch_size=8)
    right = tasks.grade_many(
        "arithmetic", [answer.text for answer in own], [question.answer for question in questions[16:]]
    )
    assert probed.probes["accuracy"][0] == sum(verdict.strict for verdict in right) / 8


class FakeClient(FakeEngine):
    """TRL's client of a server, without one: it takes what is announced, and samples some of each prompt."""

    def __init__(self, **_):
        super().__init__([])
        self.announced: list[list[str]] = []

    def init_communicator(self, device):
        pass

    def update_named_params(self, metadata, named_params):
        sent = list(named_params)
        assert [(n, str(w.dtype).removeprefix("torch."), list(w.shape)) for n, w in sent] == metadata
        self.announced.append([name for name, *_ in metadata])
        self.load(None, iter(sent), reloads=False)

    def reset_prefix_cache(self):
        self.calls.append("reset")

    def generate(self, prompts, features, *, n, temperature, max_tokens, logprobs, **_):
        each = [ids for ids in prompts for _ in range(n)]
        more = {"logprobs": logprobs}
        ids, scores = super().generate(None, each, temperature=temperature, max_tokens=max_tokens, more=more)
        return {"prompt_ids": prompts, "completion_ids": ids, "logprobs": [[[one] for one in row] for row in scores]}


@pytest.mark.slow
@pytest.mark.parametrize("qat", ["nvfp4-a4", *(pytest.param(qat, marks=pytest.mark.long) for qat in ("none", "int8"))])
def test_a_server_is_sent_what_the_loss_multiplies_by_and_asked_for_whole_groups(qat, tmp_path, monkeypatch):
    from trl.generation import vllm_generation

    client = FakeClient()
    monkeypatch.setattr(rollout, "check_installed", lambda settings: None)
    monkeypatch.setattr(rollout, "check", lambda *args: None)
    monkeypatch.setattr(vllm_generation, "is_vllm_available", lambda: True)
    monkeypatch.setattr(vllm_generation, "VLLMClient", lambda **_: client, raising=False)
    settings = SMALL.model_copy(
        update={"learning_rate": 1e-3, "qat": qat, "qat_calibration_samples": 2, "save_every": 1}
    )
    questions = tasks.load("arithmetic", "train", 20, 0)
    data = {"base": tiny.PATH, "questions": questions[:16], "task": "arithmetic", "template": "plain", "seed": 0}
    where = {"device": "cpu", "work": tmp_path / "work", "out": tmp_path / "model"}
    served = Rollout(engine="vllm", mode="server", server="http://a:1")
    probes = {"watch": Watch(probe_every=2, probe_n=4), "probe_questions": questions[16:]}
    history = grpo.run(Job(settings=settings, rollout=served, **data, **where, **probes)).history
    probe_calls = ["sync", "reset", "generate"]
    rollout_calls = ["sync", "reset", "generate"]
    assert client.calls == probe_calls + rollout_calls * 2 + probe_calls and client.asked == [None, 0, 0, None]
    scales = [name for name in client.announced[0] if name.endswith("input_global_scale")]
    assert len(scales) == (28 if qat == "nvfp4-a4" else 0), "the rounding of activations needs a scale of each linear"
    assert client.announced[0][: len(scales)] == scales and client.announced == client.announced[:1] * 4
    assert {name for name, _ in client.model.named_parameters()} == set(client.announced[0]) - set(scales)
    if qat != "nvfp4-a4":  # whose inputs a plain model does not round
        assert (history["rollout_kl_k3"] < 2e-3).all() and (history["rollout_token_ess"] > 0.99).all()
    student = AutoModelForCausalLM.from_pretrained(tmp_path / "work" / "checkpoint-2", dtype=torch.float32)
    if qat != "none":
        attach(student, qat)
    for name, weight in sync.named_weights(student, torch.bfloat16):
        assert torch.equal(client.model.get_parameter(name), weight.float()), name  # as the last probe was answered


@pytest.mark.slow
def test_a_distillation_samples_from_the_engine_with_the_students_present_weights(engine, tmp_path):
    settings = SMALL.model_copy(update={"learning_rate": 1e-3, "save_every": 1, "qat": "int8"})
    data = {"base": tiny.PATH, "questions": tasks.load("arithmetic", "train", 16, 0), "task": "arithmetic"}
    where = {"template": "plain", "seed": 0, "device": "cpu", "work": tmp_path / "work", "out": tmp_path / "model"}
    done = distill.run(
        replace(Job(settings=settings, rollout=Rollout(engine="vllm", sleep="off"), **data, **where), teacher=tiny.PATH)
    )
    assert engine.asked == [None, None], "log-probabilities that nothing reads"
    assert engine.calls == ["sync", "generate"] * 2, "TRL no longer syncs the weights once before each rollout."
    assert (done.history["rollout_sync_s"] > 0).all() and len(done.completions) == 2 * settings.completions_logged
    student = AutoModelForCausalLM.from_pretrained(tmp_path / "work" / "checkpoint-1", dtype=torch.float32)
    attach(student, "int8")
    for name, weight in sync.named_weights(student, torch.bfloat16):
        assert torch.equal(engine.model.get_parameter(name), weight.float()), name  # as step 2 sampled


@pytest.mark.slow
def test_a_distillation_through_the_engine_that_was_killed_goes_on_bit_for_bit(engine, tmp_path):
    """A new engine is given the checkpoint's weights first, and draws what the old one would have drawn."""
    changes = {"steps": 3, "save_every": 1, "learning_rate": 1e-3, "qat": "nvfp4-a4", "temperature": 1.5}
    changes |= {"prompts_per_step": 2, "max_completion_tokens": 8, "qat_calibration_samples": 2}
    settings = SMALL.model_copy(update=changes)
    data = {"base": tiny.PATH, "questions": tasks.load("arithmetic", "train", 16, 0), "task": "arithmetic"}

    def trained(folder):
        where = {"template": "plain", "seed": 0, "device": "cpu", "work": folder / "work", "out": folder / "model"}
        job = Job(settings=settings, rollout=Rollout(engine="vllm", sleep="off"), **data, **where)
        return distill.run(replace(job, teacher=tiny.PATH))

    whole = trained(tmp_path)
    shutil.copytree(tmp_path / "work", tmp_path / "again" / "work")
    shutil.rmtree(tmp_path / "again" / "work" / "checkpoint-3")
    engine.calls.clear()
    engine.model = None
    again = trained(tmp_path / "again")
    assert engine.calls == ["sync", "generate"] and (whole.resumed_from, again.resumed_from) == (0, 2)
    assert again.completions.equals(whole.completions) and whole.completions["completion"].nunique() > 3
    assert checkpoint.digest(again.path) == checkpoint.digest(whole.path)
    assert again.history["loss"].iloc[-1] == whole.history["loss"].iloc[-1] != 0


def test_a_model_under_training_says_which_of_its_weights_are_tied():
    shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    tied = Qwen2ForCausalLM(Qwen2Config(vocab_size=8, num_key_value_heads=1, tie_word_embeddings=True, **shape))
    assert "lm_head.weight" in tied.all_tied_weights_keys, (
        "transformers' models have no all_tied_weights_keys: save.write would store a tied head twice."
    )
