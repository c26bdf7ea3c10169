"""The training loop, whatever the loss: train from the newest checkpoint, check what is frozen, write, report."""

import time

from qrl import checkpoint, process
from qrl.train import arguments, guard, resume, save
from qrl.train.job import Job, Trained
from qrl.train.monitor import metrics, probe
from qrl.train.qat import prepare


def run(trainer, job: Job, base: checkpoint.Checkpoint, kind: metrics.Kind) -> Trained:
    """Train with TRL's trainer and write the outcome; raise QrlError if the base under an adapter changed in memory."""
    from transformers import PrinterCallback

    prepare.begin(trainer, job)
    watching = probe.callback(trainer, job)
    trainer.add_callback(watching)
    model = trainer.accelerator.unwrap_model(trainer.model)
    frozen = guard.Guard(model, job.settings.adapter)
    trainer.remove_callback(PrinterCallback)
    if process.rank() == 0:
        job.work.mkdir(parents=True, exist_ok=True)
        (job.work / arguments.FILE).write_text(trainer.args.to_json_string())
    last = resume.latest(job.work)
    resume.register_numbered_cpus()
    began = time.perf_counter()
    trainer.train(resume_from_checkpoint=str(last) if last else None)
    seconds = time.perf_counter() - began
    state = trainer.accelerator.get_state_dict(trainer.model) if trainer.is_fsdp_enabled else None
    frozen.check(state)
    if process.rank() == 0:
        save.trained(model, base, job, state)
    trainer.accelerator.wait_for_everyone()
    return Trained(
        path=job.out,
        adapter=job.settings.adapter,
        history=metrics.history(trainer.state.log_history, kind),
        probes=probe.curve(trainer.state.log_history),
        completions=metrics.completions(job.work, job.settings, kind),
        resumed_from=resume.step(last) if last else 0,
        seconds=seconds,
        stopped=watching.stopped,
    )
