"""Tiny real tokenizers, one for each way in which text becomes tokens."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

WORDS = (
    "the", "a", "cat", "cab", "at", "tea", "eat", "stop", "topic", "pick", "ice", "ace",
    "be", "bee", "see", "sea", "ease", "as", "so", "sole", "lesson", "on", "one", "nest",
)  # fmt: skip
EOS = len(WORDS)  # id of the end-of-sequence token
VOCAB_SIZE = len(WORDS) + 1


def word_tokenizer() -> Tokenizer:
    """One token per word, joined by spaces; the last id is the special token </s>."""
    vocab = {word: index for index, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=WORDS[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer


def byte_tokenizer() -> Tokenizer:
    """Byte-level BPE with few merges, so that most characters take many tokens. 0 is special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("h", "e"), ("he", "l"), ("\u0120", "a"), ("\u00f0", "\u0141")]
    pieces = ["<s>", *alphabet, *(left + right for left, right in merges)]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


def byte_fallback_tokenizer() -> Tokenizer:
    """As Llama's: pieces with a mark for the space, and a token for each byte. 0 is special."""
    pieces = ["<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "b", "\u2581a"]
    pieces += ["\u2581\u2581", "\u2581\u2581a"]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab, [("\u2581", "a")], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer
