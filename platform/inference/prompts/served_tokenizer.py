"""ServedTokenizer: the tokenizer of the served model, once it is loaded."""

import asyncio
from pathlib import Path

from loraplex.engine.client import STARTING
from loraplex.engine.text.tokenizer import Tokenizer
from loraplex.platform.catalog.adapter_text import AdapterText, read_adapter_text
from loraplex.platform.errors import Unavailable


class ServedTokenizer:
    """Loaded before the first request, and again if a new engine serves another folder."""

    def __init__(self) -> None:
        self._loaded: tuple[Path, Tokenizer] | None = None

    async def load(self, folder: Path) -> None:
        """Loads the tokenizer of a folder, unless it is loaded already.

        Raises:
            UnsupportedModel: if the folder has no tokenizer that can be loaded.
        """
        if self._loaded is not None and self._loaded[0] == folder:
            return
        found = await asyncio.to_thread(Tokenizer.from_folder, folder)
        self.close()
        self._loaded = folder, found

    def get(self) -> Tokenizer:
        """Raises Unavailable while no tokenizer is loaded."""
        return self._get()[1]

    async def read_adapter_text(self, folder: Path) -> AdapterText:
        """Returns the chat template and the notes on text of an adapter's folder.

        Raises:
            RequestRejected: if the folder has an invalid chat template.
            Unavailable: while no tokenizer is loaded.
        """
        return await asyncio.to_thread(read_adapter_text, folder, *self._get())

    def close(self) -> None:
        if self._loaded is not None:
            self._loaded[1].close()

    def _get(self) -> tuple[Path, Tokenizer]:
        if self._loaded is None:
            raise Unavailable(STARTING)
        return self._loaded
