"""A study with quantization-aware training promotes stages of its own, which are loaded and served."""

import os
import subprocess
import sys
import time
from pathlib import Path

import openai
import pytest
from torch.distributed.elastic.utils.distributed import get_free_port

import qrl

pytestmark = [pytest.mark.study, pytest.mark.slow]

ROOT = Path(qrl.__file__).parents[1]
SMALL = "--device cpu --train.steps 2 --train.prompts_per_step 4 --train.generations 4 --evaluate.n 60 "
SMALL += "--promote.min_gain -1 --promote.max_loss 1"
QUESTION = "Tom has 5 apples and buys 7 more. How many apples does Tom have now?"
LOADED = f"""
from torch.distributed.elastic.utils.distributed import get_free_port

import qrl
model, tokens = qrl.load("qrl-tiny", stage="int8")
chat = [{{"role": "user", "content": "{QUESTION}"}}]
ids = tokens.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
made = model.generate(**ids, do_sample=False, max_new_tokens=60)
print(tokens.decode(made[0, ids["input_ids"].shape[1] :], skip_special_tokens=True))
"""


def test_the_stages_of_a_qat_study_are_promoted_loaded_and_served(tmp_path):
    how = {"cwd": ROOT, "env": os.environ | {"MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db"}, "text": True}
    qrl_command = [sys.executable, "-m", "qrl"]
    words = [*qrl_command, "study", "--yes", "--recipe", "qat-int8", *SMALL.split()]
    done = subprocess.run(words, capture_output=True, check=False, **how)
    assert done.returncode == 0, done.stderr
    assert "promote: base → qat-int8 → int8" in done.stderr
    loaded = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, check=True, **how).stdout.strip()
    port = get_free_port()
    words = [*qrl_command, "serve", "--stage", "int8", "--engine", "transformers", "--port", str(port)]
    with open(tmp_path / "serve.log", "w") as log:
        server = subprocess.Popen(words, stdout=log, stderr=log, **how)
        try:
            client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
            end = time.monotonic() + 120
            while True:
                try:
                    (model,) = client.models.list().data
                    break
                except openai.APIConnectionError:
                    assert server.poll() is None and time.monotonic() < end, (tmp_path / "serve.log").read_text()
                    time.sleep(0.2)
            chat = [{"role": "user", "content": QUESTION}]
            answer = client.chat.completions.create(model=model.id, messages=chat, temperature=0, max_tokens=60)
        finally:
            server.terminate()
            assert server.wait(30) == 0
    assert model.id == "qrl-tiny@3" and answer.choices[0].message.content.strip() == loaded
