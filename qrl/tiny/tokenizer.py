"""qrl-tiny's tokenizer: byte-level BPE with single digits, Qwen2's pre-tokenization, and Qwen's chat markers."""

from collections.abc import Iterable
from pathlib import Path

END, START, PAD = "<|im_end|>", "<|im_start|>", "<|endoftext|>"
VOCABULARY = 512
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# Qwen2's own pattern, so that transformers' Qwen2Tokenizer, which builds it again, splits like tokenizer.json.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def make(texts: Iterable[str], folder: Path):
    """Learn merges from prose and the chat's roles; save the tokenizer into a folder and return it as read back."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from transformers import AutoTokenizer, Qwen2Tokenizer

    bpe = Tokenizer(models.BPE())
    bpe.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(SPLIT), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    bpe.decoder = decoders.ByteLevel()
    alphabet, markers = sorted(pre_tokenizers.ByteLevel.alphabet()), [PAD, START, END]
    settings = {"vocab_size": VOCABULARY, "special_tokens": markers, "initial_alphabet": alphabet}
    trainer = trainers.BpeTrainer(show_progress=False, **settings)
    bpe.train_from_iterator((f"user\n{text}\nassistant\n" for text in texts), trainer)
    special = {"eos_token": END, "pad_token": PAD, "unk_token": None, "bos_token": None}
    special |= {"additional_special_tokens": [START], "clean_up_tokenization_spaces": False}
    tokenizer = Qwen2Tokenizer(tokenizer_object=bpe, chat_template=CHAT_TEMPLATE, model_max_length=512, **special)
    tokenizer.save_pretrained(folder, save_jinja_files=False)
    return AutoTokenizer.from_pretrained(folder)
