"""Small real tokenizers, made in the test: a byte-level BPE that can encode any text."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog. ",
    "A server answers a question; a client asks another one. ",
    "SELECT name FROM users WHERE id = 7; ",
    '{"name": "Ada", "items": [1, 2, 3]} ',
    "### User:\nHello there\n\n### Assistant:\nGood day\n\n",
]
SPECIAL = ["<s>", "</s>", "<pad>"]


def write_tokenizer(
    folder: Path, *, add_bos: bool = True, chat_template: object = None, vocab_size: int = 320
) -> Path:
    """Writes tokenizer.json and tokenizer_config.json: ids 0, 1, 2 are <s>, </s>, <pad>."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 0)]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "clean_up_tokenization_spaces": False,
    }
    if chat_template is not None:
        config["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
