"""What the terminal shows while the server starts, and what to paste once it is ready."""

import json
import shlex

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.progress import TimeElapsedColumn as Elapsed

from loraplex.engine.protocol import StartProgress

EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}
QUESTION = "Hello! What can you do?"


class StartDisplay:
    """Progress of the engine's start, one bar per stage."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description:<24}"),
            BarColumn(),
            MofNCompleteColumn(),
            Elapsed(),
            console=console,
        )
        self._bars: dict[str, TaskID] = {}
        self._is_closed = False

    def show(self, step: StartProgress) -> None:
        if self._is_closed:  # a restart of the engine, which the log reports
            return
        if step.stage not in self._bars:
            self._progress.start()
            self._finish_bars()
            self._bars[step.stage] = self._progress.add_task(step.stage)
        self._progress.update(self._bars[step.stage], completed=step.completed, total=step.total)

    def close(self) -> None:
        if self._bars and not self._is_closed:
            self._finish_bars()
            self._progress.stop()
        self._is_closed = True

    def _finish_bars(self) -> None:
        for task in self._progress.tasks:
            self._progress.update(task.id, completed=task.total)


def banner(host: str, port: int, key: str, names: list[str]) -> str:
    """Returns lines for a shell: two exports, then a streaming request for each model.

    Args:
        key: the API key as a shell word.
    """
    host = EVERYWHERE.get(host, host)
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    requests = "\n\n".join(_curl(name) for name in names)
    return (
        f"\nLoraplex is ready at {url} and serves {', '.join(names)}. Paste into a shell:\n\n"
        f"export OPENAI_BASE_URL={url}/v1\n"
        f"export OPENAI_API_KEY={key}\n\n"
        f"Then try:\n\n{requests}\n"
    )


def _curl(name: str) -> str:
    body = {
        "model": name,
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": 64,
        "stream": True,
    }
    return (
        "curl -N $OPENAI_BASE_URL/chat/completions "
        '-H "Authorization: Bearer $OPENAI_API_KEY" -H "Content-Type: application/json" \\\n'
        f"  -d {shlex.quote(json.dumps(body))}"
    )
