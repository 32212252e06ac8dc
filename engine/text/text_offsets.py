"""TextOffsets: the place in a text where each of its tokens begins."""

from collections.abc import Sequence

from tokenizers import Tokenizer

from loraplex.engine.text.detokenizer import Detokenizer


class TextOffsets:
    """Follows one text token by token.

    The tokens of one character all begin where it does; a token left out of the text begins where
    the next one does.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
    ) -> None:
        self._detokenizer = Detokenizer(
            tokenizer, list(prompt_token_ids), skip_special_tokens=skip_special_tokens
        )
        self._length = 0

    def add(self, token_id: int) -> int:
        """Returns the token's offset in characters."""
        offset = self._length
        self._detokenizer.add(token_id)
        self._length += len(self._detokenizer.take())
        return offset


def offsets_in(tokenizer: Tokenizer, token_ids: Sequence[int], text: str) -> list[int]:
    """Returns the offset of each token in a text that may show special tokens which decoding leaves
    out."""
    offsets = TextOffsets(tokenizer)
    found, num_shown = [], 0  # characters of special tokens
    for token_id in token_ids:
        found.append(offsets.add(token_id) + num_shown)
        if not tokenizer.decode([token_id], skip_special_tokens=True):
            content = tokenizer.id_to_token(token_id) or ""
            num_shown += len(content) if text.startswith(content, found[-1]) else 0
    return found
