"""Shorten the logs of a model: no second copy of a text, no events, which repeat the messages; base's log as JSON."""

import json
import pathlib
import sys

from inspect_ai.log import read_eval_log, write_eval_log

model = sys.argv[1]
made = next(pathlib.Path("lm", model).rglob("samples_*.jsonl"))
rows = [json.loads(line) for line in made.read_text().splitlines()]
for row in rows:
    row["doc"] = {"id": row["doc"]["id"]}
pathlib.Path(f"{model}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
log = read_eval_log(str(next(pathlib.Path("inspect", model).glob("*.eval"))))
for sample in log.samples:
    sample.events, sample.attachments = [], {}
log.reductions = None
write_eval_log(log, f"{model}.json" if model == "base" else f"{model}.eval")
if model == "base":
    short = json.loads(pathlib.Path("base.json").read_text())
    pathlib.Path("base.json").write_text(json.dumps(short) + "\n")
