# How the logs beside this file were made: lm-eval 0.4.13, inspect-ai 0.3.285, transformers 5.23.0, torch 2.13.0, a CPU.
# Run in a folder with questions.jsonl, words.yaml, words.py and the models base (qrl-tiny), grpo (base after `python -m
# qrl train`), base-nf4 and grpo-nf4 (both stored by transformers with bitsandbytes' NF4, double quantization).
for model in base grpo base-nf4 grpo-nf4; do
  lm-eval --model hf --model_args pretrained=$model,dtype=float32 --tasks words --include_path . --limit 12 \
    --apply_chat_template --log_samples --output_path lm/$model --batch_size 12 --device cpu
  inspect eval words.py --model hf/$model -M model_path=$model -M device=cpu -T scored=line+end --limit 6 \
    --epochs 2 --temperature 0.7 --seed 0 --max-tokens 96 --log-dir inspect/$model --display none
  python trim.py $model
done
