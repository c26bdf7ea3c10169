"""Load a checkpoint and generate from token ids; evaluation, calibration, training probes and benchmarks share it.

Public: `hf.load`, `hf.tokenizer`, `hf.generate` (transformers); `vllm.Vllm` (vLLM, in its own environment);
`device.choose`, `device.compute_dtype`; `pretrained.load`, `pretrained.skeleton` (models without decoding);
`attention.use_grouped`.
"""
