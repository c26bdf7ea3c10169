"""Students that FSDP 2 divides, on two processes of a CPU: what one process computes, bit for bit.

accelerate starts FSDP on no CPU, so most tests shard with torch's `fully_shard` as accelerate does; the slow ones give
accelerate the type that it gives GPUs, and run the whole trainer.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from qrl import checkpoint, tiny
from qrl.recipe import Train
from tests.train import pair

pytest.importorskip("compressed_tensors")
pytestmark = [pytest.mark.process, pair.flaky]

COMPARED = """
import functools, math, sys
from types import SimpleNamespace
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from qrl import process, tiny
process.prepare_process()
from qrl.engine import pretrained
from qrl.errors import BadInput, QrlError
from qrl.train import distill, parallel, sharded
from qrl.train.trl import distillation
from qrl.train.qat import linear, prepare
from qrl.train.qat.fold import folds
from qrl.recipe import rules
from qrl.train.rollout import codes, sync
from qrl.train.teacher import local

torch.set_num_threads(1)
name, dtype, kind = sys.argv[1], {"bf16": torch.bfloat16, "fp32": None}[sys.argv[2]], sys.argv[3]
if kind == "cuda":
    torch.cuda.set_device(process.local_rank())
distributed.init_process_group({"cpu": "gloo", "cuda": "nccl"}[kind])
rank, place = distributed.get_rank(), torch.device(kind, process.local_rank() if kind == "cuda" else None)
draw = torch.Generator().manual_seed(1)
ids = torch.randint(3, 200, (4, 16), generator=draw)
mask = torch.ones_like(ids)
mask[1, 11:] = 0
ids, mask = ids.to(place), mask.to(place)
batch = {"input_ids": ids, "attention_mask": mask}
autocast = torch.autocast(kind, dtype=torch.bfloat16, enabled=dtype is not None)


def laid_out(shards):
    model = pretrained.load(tiny.PATH, dtype=torch.float32)
    linear.attach(model.eval() if shards else model.eval().to(place), name, dtype, shards=shards)
    if shards:
        mesh = init_device_mesh(kind, (2,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        tail = [model.model.norm, model.get_input_embeddings(), model.lm_head]  # tied, as accelerate groups them
        fully_shard(tail, mesh=mesh, reshard_after_forward=False)
        fully_shard(model, mesh=mesh)
        linear.begin(model.to(place))  # buffers
    return model


def used(model):
    '''Return every matrix that a forward pass multiplies by, and its logits.'''
    seen, plain = [], torch.nn.functional.linear

    def note(inputs, weight, bias=None):
        seen.append(weight.detach().clone())
        return plain(inputs, weight, bias)

    linear.functional.linear = note
    try:
        with autocast:
            logits = model(**batch).logits
    finally:
        linear.functional.linear = plain
    return seen, logits


def close(ours, theirs):
    bound = 5e-2 if dtype else {"cpu": 1e-4, "cuda": 1e-2}[kind]  # each process multiplies half of the rows
    assert (ours - theirs).norm() <= bound * theirs.norm(), ((ours - theirs).norm() / theirs.norm())


def step(model, optimizer):
    '''Return loss and gradients of a step whose rows the processes share, and take it.'''
    shards = folds(model)[0].sharded
    mine = {key: value[2 * rank : 2 * rank + 2] if shards else value for key, value in batch.items()}
    weights = mask[2 * rank : 2 * rank + 2] if shards else mask
    with autocast:
        logits = model(**mine, use_cache=False).logits[:, :-1].float()
    loss = -logits.log_softmax(-1).gather(-1, mine["input_ids"][:, 1:, None])[..., 0]
    loss = (loss * weights[:, 1:]).sum() / mask[:, 1:].sum() * (2 if shards else 1)  # FSDP averages gradients
    loss.backward()
    gradients = {path: whole(weight.grad) for path, weight in model.named_parameters()}
    optimizer.step()
    optimizer.zero_grad()
    linear.refold(model)
    total = loss.detach().clone()
    if shards:
        distributed.all_reduce(total)
        total /= 2
    return total, gradients


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def same_sync():
    for sent, wanted in (
        (sync.named_scales(parts), sync.named_scales(one)),
        (sync.named_weights(parts, torch.bfloat16), sync.named_weights(one, torch.bfloat16)),
        *([(codes.named_codes(parts, torch.bfloat16), codes.named_codes(one, torch.bfloat16))]
          if name in rules.CODE_FORMATS and dtype is None else []),
    ):
        wanted = list(wanted)  # both generators turn gradients off while they run
        for (ours, sends), (theirs, wants) in zip(sent, wanted, strict=True):
            assert ours == theirs and sends.dtype == wants.dtype and sends.equal(wants), ours
    assert not any(fold.pending for fold in folds(parts)), "kept"


one, parts = laid_out(False), laid_out(True)
optimizers = {model: torch.optim.AdamW(model.parameters(), lr=1e-3) for model in (one, parts)}
batches = [{key: value[:2] for key, value in batch.items()}, {key: value[2:] for key, value in batch.items()}]
if name == "nvfp4-a4":
    assert prepare.calibrate(parts, batches) == prepare.calibrate(one, batches), "scales"
with autocast:
    assert prepare.logprob_gap(parts, batches) == prepare.logprob_gap(one, batches), "gap"
assert not hasattr(parts.lm_head.weight, "full_tensor") and parts.lm_head.weight is parts.model.embed_tokens.weight
same_sync()  # where the last forward pass has left embeddings and head gathered
sharded.release(parts)
assert all(hasattr(weight, "full_tensor") for weight in parts.parameters())
same_sync()
ours, theirs = (prepare.state(model) for model in (parts, one))
assert {key: parallel.digest(each) for key, each in ours.items()} == {
    key: parallel.digest(each) for key, each in theirs.items()
}, "state"
for checkpointing in (None, False, True):
    if checkpointing is not None:
        for model in (one, parts):
            model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
            model.enable_input_require_grads()
            model.train()
    with torch.no_grad():
        (sees, logits), (wants, others) = used(parts), used(one)
    assert len(sees) == len(wants) == 29 and all(map(torch.equal, sees, wants)), "Q(W)"  # the last is the head
    assert logits.equal(others), "logits"
    (loss, gradients), (other, wanted) = (step(model, optimizers[model]) for model in (parts, one))
    close(loss, other)
    for path, gradient in gradients.items():
        close(gradient, wanted[path])
    assert gradients["model.layers.1.mlp.up_proj.weight"].any(), "no gradient"
    with torch.no_grad():  # the same masters, whatever the order of sums was
        for path, weight in one.named_parameters():
            weight.copy_(whole(parts.get_parameter(path).detach()))
    linear.refold(one)
    with torch.no_grad():
        again, _ = used(parts)
    assert not any(map(torch.equal, again, sees)), "old Q(W)"
    same_sync()

# A distillation's loss, through the student's forward pass.
valid = mask[:, 8:].bool()
stands = SimpleNamespace(_get_last_hidden_state=lambda model, ids, mask, keep: model.model(
    input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state[:, -keep - 1:-1])
teacher = local.shard(lambda: pretrained.load(tiny.PATH, dtype=torch.float32).requires_grad_(False).eval(), place)


def distilled(model):
    score = functools.partial(distillation._logits, stands, ids=ids, mask=mask, valid=valid)
    with autocast:
        with torch.no_grad():
            likeliest = local.likeliest(distillation.redirect(teacher, lambda _: score(teacher), ids), 16)
        student = distillation.redirect(model, lambda _: score(model), ids)
        loss = distill.divergence(student, likeliest, reverse=0.5).mean()
    loss.backward()
    return loss.detach(), {path: whole(weight.grad) for path, weight in model.named_parameters()}

(loss, gradients), (other, wanted) = distilled(parts), distilled(one)
assert loss > 0
close(loss, other)
for path, gradient in gradients.items():
    close(gradient, wanted[path])

weight = parts.model.layers[2].mlp.gate_proj.weight
if rank == 1:
    weight.detach().to_local()[0, 0] = math.nan
try:
    linear.refold(parts)
    raise AssertionError("NaN was not seen")
except QrlError as error:
    assert "model.layers.2.mlp.gate_proj holds NaN" in str(error), error
sys.stdout.write(f"rank {rank} agrees\\n")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("nvfp4-a4", "fp32"),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (("fp8", "fp32"), ("int4", "fp32"), ("nvfp4-a4", "bf16"))
        ),
    ],
)
def test_shards_compute_what_whole_weights_do(name, dtype, tmp_path):
    done = pair.run(tmp_path, COMPARED, name, dtype, "cuda" if torch.cuda.device_count() > 1 else "cpu")
    pair.check(done)
    assert done.stdout.count("agrees") == 2


TRAINED = """
import json, os, sys
from pathlib import Path
from qrl import process
process.prepare_process()
import accelerate.state
from accelerate.utils import DistributedType
from safetensors.torch import load_file
from qrl import checkpoint, tasks, tiny
from qrl.recipe import Train
from qrl.train import Job, distill, grpo, loop, parallel, sharded
from qrl.train.monitor import metrics

base, work, out, settings = sys.argv[1:]
settings = Train.model_validate_json(settings)
os.environ |= parallel.CONFIGURATIONS[settings.parallel]
begins = accelerate.state.AcceleratorState.__init__


def as_on_gpus(self, *args, fsdp_plugin=None, **named):
    begins(self, *args, fsdp_plugin=fsdp_plugin, **named)
    if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
        self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
        accelerate.state.PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        if self._mixed_precision != "no":
            fsdp_plugin.set_mixed_precision(self._mixed_precision)


accelerate.state.AcceleratorState.__init__ = as_on_gpus
seen = {}
job = Job(
    base=Path(base), questions=tasks.load("arithmetic", "train", 16, 0), task="arithmetic", template="plain", seed=0,
    settings=settings, device="cpu", work=Path(work), out=Path(out), log=lambda found, step: seen.update({step: found}),
)
with process.sentences():
    process.hush_transformers()
    make, kind = (grpo.make_trainer, metrics.GRPO)
    if settings.teacher:
        make, kind = (lambda job: distill.make_trainer(job, tiny.PATH)), metrics.DISTILLATION
    trainer = make(job)
    done = loop.run(trainer, job, checkpoint.check(job.base), kind)
weights = list(trainer.model.parameters())
parts = [getattr(weight, "_local_tensor", weight).numel() for weight in weights]  # FSDP 2's part of it
held = sum(parts) / sum(weight.numel() for weight in weights)
told = {"resumed_from": done.resumed_from, "history": done.history.to_dict("list"), "held": held, "start": seen.get(0)}
sys.stdout.write(f"rank {process.rank()} told {json.dumps(told)}\\n")
"""
SMALL = Train(
    steps=3,
    prompts_per_step=4,
    generations=4,
    micro_batch=8,
    max_completion_tokens=24,
    save_every=1,
    learning_rate=4e-5,
    top_k=1,
    qat_calibration_samples=4,
    qat_calibration_batch=2,
)


def trained(folder: Path, base: Path, **changes) -> list[dict]:
    """Train on two processes, and return what each told at its end, by rank."""
    folder.mkdir(exist_ok=True)
    settings = SMALL.model_copy(update=changes)
    done = pair.run(folder, TRAINED, base, folder / "work", folder / "model", settings.model_dump_json())
    pair.check(done)
    told = dict(line.split(" told ") for line in done.stdout.splitlines() if " told " in line)
    return [json.loads(told[f"rank {rank}"]) for rank in (0, 1)]


def apart(base: Path, one: Path, two: Path) -> float:
    """Return how far two trainings ended from one another, over how far the first one moved."""
    start, ours, theirs = (load_file(path / "model.safetensors") for path in (base, one, two))
    assert ours.keys() == theirs.keys() and all(weight.dtype == theirs[name].dtype for name, weight in ours.items())
    differences = ([(ours[name].float() - to[name].float()).flatten() for name in ours] for to in (start, theirs))
    moved, other = map(torch.cat, differences)
    return float(other.norm() / moved.norm())


VARIED = {"top_k": 0, "temperature": 2.0, "max_completion_tokens": 32}  # so that a group's rewards differ
CASES = {  # the loss and its format
    "grpo nvfp4-a4": {"qat": "nvfp4-a4", "gradient_checkpointing": True} | VARIED
}
FURTHER = {
    "distillation bf16 int4": {"teacher": "qrl-tiny", "dtype": "bf16", "max_completion_tokens": 8, "qat": "int4"},
    "distillation nvfp4-a4": {"teacher": "qrl-tiny", "qat": "nvfp4-a4", "teacher_placement": "sharded"},
    "grpo int4": {"qat": "int4"} | VARIED,
    "distillation": {"teacher": "qrl-tiny"},
    "distillation bf16": {"teacher": "qrl-tiny", "dtype": "bf16", "max_completion_tokens": 8},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", [*CASES, *(pytest.param(case, marks=pytest.mark.long) for case in FURTHER)])
def test_the_trainer_shards_as_it_trains_whole_and_goes_on_from_a_checkpoint(case, tmp_path, away):
    """Sampling by seed and process is the same under DDP, whose processes hold whole weights."""
    changes = (CASES | FURTHER)[case]
    base = away if "teacher" in changes else tiny.PATH
    whole, parts = (trained(tmp_path / each, base, **changes | {"parallel": each}) for each in ("ddp", "fsdp2"))
    assert [told["held"] for told in whole] == [1.0, 1.0] and all(told["held"] < 0.6 for told in parts)
    assert any(whole[0]["history"]["loss"]) and parts[0]["start"] == whole[0]["start"]
    for name in ("loss", "grad_norm", "completion_tokens"):
        assert parts[0]["history"][name] == pytest.approx(whole[0]["history"][name], rel=2e-2, abs=1e-5), name
    assert apart(base, tmp_path / "ddp/model", tmp_path / "fsdp2" / "model") < 0.05
    kept = Path("work", "checkpoint-2")
    shutil.copytree(tmp_path / "fsdp2" / kept, tmp_path / "again" / kept)
    for file in (tmp_path / "fsdp2" / "work").glob("*.json"):
        shutil.copy(file, tmp_path / "again/work")
    again = trained(tmp_path / "again", base, **changes | {"parallel": "fsdp2"})
    assert again[0]["resumed_from"] == 2 and again[0]["start"] == parts[0]["start"]
    assert checkpoint.digest(tmp_path / "again/model") == checkpoint.digest(tmp_path / "fsdp2" / "model")
