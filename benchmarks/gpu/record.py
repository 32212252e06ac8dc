"""Records: what became of each case, in one JSON file that is whole after every case."""

import json
from pathlib import Path
from typing import Any

Record = dict[str, Any]


class Records:
    """Appends to a file's list of records; what is in the file already stays."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def all(self) -> list[Record]:
        return self.whole()["records"]

    def whole(self) -> dict[str, Any]:
        return json.loads(self._path.read_text())

    def add(self, group: str, name: str, **facts: Any) -> None:
        whole = self.whole()
        whole["records"].append({"group": group, "case": name, **facts})
        self.write(whole)

    def write(self, whole: dict[str, Any]) -> None:
        part = self._path.with_suffix(".part")
        part.write_text(json.dumps(whole, indent=1) + "\n")
        part.replace(self._path)
