"""The tokenizer of models made here: byte-level BPE, single digits, Qwen2's pre-tokenization, Qwen's chat markers."""

from collections.abc import Iterable
from pathlib import Path

END = "<|im_end|>"
START = "<|im_start|>"
PAD = "<|endoftext|>"
THINK = ("<think>", "</think>")  # tokens of their own, but not special, so that answers keep them, as Qwen3's do
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# As Qwen3's template: the model thinks, unless `enable_thinking` is false, which writes an empty thinking part for it.
THINKING_TEMPLATE = CHAT_TEMPLATE.removesuffix("{% endif %}") + (
    "{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
    "{% endif %}"
)
# Qwen2's own pattern, so that transformers' Qwen2Tokenizer, which builds it again, splits like tokenizer.json.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def make(texts: Iterable[str], folder: Path, vocabulary: int = 512, positions: int = 512, thinking: bool = False):
    """Learn merges from prose and the chat's roles; save the tokenizer into a folder and return it as read back.

    Args:
        texts: prose to learn from.
        folder: where it is saved.
        vocabulary: most tokens; prose with few different words gives fewer.
        positions: the model's longest text, in tokens.
        thinking: add `THINK`, and a chat template that knows `enable_thinking`.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from transformers import AutoTokenizer, Qwen2Tokenizer

    bpe = Tokenizer(models.BPE())
    bpe.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(SPLIT), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    bpe.decoder = decoders.ByteLevel()
    think_tokens = [AddedToken(token, normalized=False, special=False) for token in THINK] if thinking else []
    trainer = trainers.BpeTrainer(
        show_progress=False,
        vocab_size=vocabulary - len(think_tokens),
        special_tokens=[PAD, START, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    bpe.train_from_iterator((f"user\n{text}\nassistant\n" for text in texts), trainer)
    bpe.add_tokens(think_tokens)
    tokenizer = Qwen2Tokenizer(
        tokenizer_object=bpe,
        chat_template=THINKING_TEMPLATE if thinking else CHAT_TEMPLATE,
        model_max_length=positions,
        eos_token=END,
        pad_token=PAD,
        unk_token=None,
        bos_token=None,
        additional_special_tokens=[START],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.save_pretrained(folder, save_jinja_files=False)
    return AutoTokenizer.from_pretrained(folder)
