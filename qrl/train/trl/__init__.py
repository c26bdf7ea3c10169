"""All that touches what TRL keeps private, in three files by subject.

`grpo` changes which groups a step trains on, `distillation` the loss, and `vllm_link` who samples. The rest of qrl uses
TRL's documented interface alone, so a new version of TRL can break these three files and no others;
`tests/train/test_trl_private.py` states what they rely on, and fails first.
"""
