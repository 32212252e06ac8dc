"""Detokenizer: decodes tokens to text as they come, never half a character, and finds stop
strings."""

from tokenizers import Tokenizer

# Tokens of the prompt, decoded along so that the first output token joins on as it should.
CONTEXT_TOKENS = 6
MAX_CHAR_TOKENS = 4  # a character has at most four bytes, a token at least one
MAX_OPEN_TOKENS = 16  # more without whole text are invalid bytes, or tokens that have no text
REPLACEMENT = "\ufffd"


class Detokenizer:
    """Decodes one sequence's output incrementally.

    Text is held back while its last character is incomplete, and while its end could begin a stop
    string; `flush` returns what is still held. All deltas together are the decoded output.
    `stop_tokens` are the stop strings that never become text, by token id. The two-offset method is
    text-generation-inference's: decode a short window with and without the newest tokens, and
    return the difference.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: list[int],
        *,
        stop: tuple[str, ...] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._stop = stop
        self.stop_tokens = self._hidden_stops()
        self._include_stop = include_stop
        self._ids = prompt_token_ids[-CONTEXT_TOKENS:]
        self._window_start, self._read = self._open_window()
        self._held = ""  # decoded, not yet given out

    def fork(self) -> "Detokenizer":
        twin = object.__new__(Detokenizer)
        twin._tokenizer = self._tokenizer
        twin._skip_special_tokens = self._skip_special_tokens
        twin._stop = self._stop
        twin._include_stop = self._include_stop
        twin.stop_tokens = self.stop_tokens
        twin._ids = list(self._ids)
        twin._window_start, twin._read = self._window_start, self._read
        twin._held = self._held
        return twin

    def add(self, token_id: int) -> None:
        """Decodes one more token; `take` returns what became text."""
        self._ids.append(token_id)
        text = self._open_text(len(self._ids))
        if text and not text.endswith(REPLACEMENT):
            self._accept(text, len(self._ids))
        elif len(self._ids) - self._read > MAX_OPEN_TOKENS:
            self._settle(text)

    def find_stop(self) -> str | None:
        """Cuts the held text at the first stop string in it, if there is one."""
        matches = [(self._held.find(stop), stop) for stop in self._stop if stop in self._held]
        if not matches:
            return None
        position, stop = min(matches)
        self._held = self._held[: position + (len(stop) if self._include_stop else 0)]
        self._ids, self._read = [], 0  # what comes after the stop is not text of the answer
        self._window_start = 0
        return stop

    def take(self) -> str:
        """Returns the text that can be given out now."""
        keep = self._num_held_back()
        text, self._held = (
            self._held[: len(self._held) - keep],
            self._held[len(self._held) - keep :],
        )
        return text

    def flush(self) -> str:
        """Returns all remaining text, an incomplete character as U+FFFD. For the end only."""
        self._accept(self._open_text(len(self._ids)), len(self._ids))
        text, self._held = self._held, ""
        return text

    def _open_window(self) -> tuple[int, int]:
        """Returns (start, end) of the context: whole characters only, where the prompt has some.

        A character that the prompt leaves incomplete belongs to the output. A character cut by the
        start of the context is left out, since byte fallback decodes a run of bytes as a whole or
        not at all.
        """
        length = len(self._ids)
        for end in range(length, max(0, length - MAX_CHAR_TOKENS), -1):
            for start in range(end):
                if not self._decode(start, end).endswith(REPLACEMENT):
                    return start, end
        return 0, 0 if length < MAX_CHAR_TOKENS else length

    def _open_text(self, end: int) -> str:
        """Returns what the tokens from the accepted ones up to `end` add to the text."""
        before = self._decode(self._window_start, self._read)
        after = self._decode(self._window_start, end)
        if after.startswith(before):
            return after[len(before) :]
        return self._decode(self._read, end)  # a bad byte spoilt a good run of bytes before it

    def _accept(self, text: str, end: int) -> None:
        self._held += text
        self._window_start, self._read = self._read, end

    def _settle(self, text: str) -> None:
        """Limits the number of open tokens where they cannot become a character; `text` is
        theirs."""
        if not text:
            del self._ids[self._read :]
            return
        for end in range(len(self._ids) - MAX_CHAR_TOKENS + 1, self._read, -1):
            settled = self._open_text(end)
            if text.startswith(settled):
                self._accept(settled, end)
                return

    def _hidden_stops(self) -> dict[int, str]:
        """Returns stop strings that are special tokens, by id: left out of the text, they match
        nothing."""
        if not self._skip_special_tokens:
            return {}
        named = {self._tokenizer.token_to_id(stop): stop for stop in self._stop}
        return {
            token: stop
            for token, stop in named.items()
            if token is not None
            and self._tokenizer.decode([token], skip_special_tokens=False)
            and not self._tokenizer.decode([token], skip_special_tokens=True)
        }

    def _num_held_back(self) -> int:
        """Returns the length of the longest end of the held text that begins a stop string."""
        longest = 0
        for stop in self._stop:
            for length in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:length]):
                    longest = length
                    break
        return longest

    def _decode(self, start: int, end: int) -> str:
        return str(
            self._tokenizer.decode(
                self._ids[start:end], skip_special_tokens=self._skip_special_tokens
            )
        )
