"""The command line: `loraplex serve`, `loraplex capacity`."""

import functools
import inspect
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from typing import Annotated, Any

import typer
import uvloop
from rich.console import Console

from loraplex import __version__
from loraplex.platform.config import MAPPINGS, Settings, load_settings, option_of
from loraplex.platform.errors import SettingsRefused, StartFailed
from loraplex.platform.serve import serve_until_stopped

EXIT_REFUSED = 2
EXIT_FAILED = 1

app = typer.Typer(
    name="loraplex",
    help="Serve one base model and many LoRA adapters from one paged KV pool.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # its table cuts long option names
    pretty_exceptions_enable=False,
)
console = Console(stderr=True, highlight=False)


def option(setting: str, metavar: str) -> Any:
    """Returns a command line option with its setting's help text and default."""
    field = Settings.model_fields[setting]
    shown = "none" if field.default is None or field.default == {} else field.default
    note = "must be given" if field.is_required() else f"default: {shown}"
    return typer.Option(
        f"--{option_of(setting)}",
        metavar=metavar,
        help=f"{field.description} [{note}]",
        show_default=False,
    )


OPTIONS = {  # the settings that are options of `serve`, and the names of their values
    "model": "FOLDER",
    "served_model_name": "NAME",
    "adapters": "NAME=FOLDER",
    "allow_base_mismatch": "",
    "strict_adapters": "true|false",
    "base_prompts": "NAME=FILE",
    "adapter_activations": "ADAPTER=ACTIVATION",
    "adapter_base_prompts": "ADAPTER=BASE_PROMPT",
    "allow_chat_templates": "",
    "host": "HOST",
    "port": "PORT",
    "api_key": "KEY",
    "operator_key": "KEY",
    "cors_origins": "ORIGINS",
    "max_body_size": "BYTES",
    "max_open_choices": "N",
    "max_connections": "N",
    "max_connections_per_address": "N",
    "request_timeout": "SECONDS",
    "send_timeout": "SECONDS",
    "max_unread": "BYTES",
    "max_queue": "N",
    "metrics_token": "TOKEN",
    "metrics_max_age": "SECONDS",
    "keep_alive_timeout": "SECONDS",
    "shutdown_timeout": "SECONDS",
    "dtype": "auto|float32|bfloat16|float16",
    "device": "auto|cpu|cuda",
    "max_model_len": "N",
    "max_num_seqs": "N",
    "max_num_batched_tokens": "N",
    "max_num_waiting": "N",
    "kv_cache_memory": "BYTES",
    "block_size": "N",
    "kv_group_size": "N",
    "offload_memory": "BYTES",
    "offload_disk": "BYTES",
    "eviction": "cost|lru",
    "eviction_half_life": "SECONDS",
    "scheduling": "fair|fcfs",
    "max_adapter_slots": "N",
    "adapter_memory": "BYTES",
    "seed": "N",
    "hang_timeout": "SECONDS",
    "step_timeout": "SECONDS",
    "num_threads": "N",
    "kernels": "auto|naive|triton",
    "quantization": "none|int8",
}


def with_options(command: Callable[[dict[str, Any]], None]) -> Callable[..., None]:
    """Gives a command one parameter per entry of `OPTIONS`, and calls it with those given."""

    @functools.wraps(command)
    def call(**given: Any) -> None:
        command({name: value for name, value in given.items() if value not in (None, False)})

    parameters = [_parameter(setting, metavar) for setting, metavar in OPTIONS.items()]
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {it.name: it.annotation for it in parameters}
    return call


def _parameter(setting: str, metavar: str) -> inspect.Parameter:
    """Returns a parameter that takes text; `Settings` parses it, and names all faults at once."""
    kind: Any = list[str] | None if setting in MAPPINGS else str | None
    is_flag = not metavar
    return inspect.Parameter(
        option_of(setting).replace("-", "_"),
        inspect.Parameter.KEYWORD_ONLY,
        default=False if is_flag else None,
        annotation=Annotated[bool if is_flag else kind, option(setting, metavar)],
    )


@app.command()
@with_options
def serve(given: dict[str, Any]) -> None:
    """Serve a model and its adapters over an OpenAI-compatible API.

    Every option can also be set as an environment variable: --max-model-len is
    LORAPLEX_MAX_MODEL_LEN. Data lives under LORAPLEX_HOME, by default ~/.loraplex.
    """
    os.umask(0o077)  # files and sockets of this process and of its engine are their owner's alone
    try:
        gather_mappings(given)
        uvloop.run(serve_until_stopped(load_settings(given), console))
    except SettingsRefused as refusal:
        raise _complain(refusal.faults, EXIT_REFUSED) from refusal
    except StartFailed as failure:
        raise _complain(failure.faults, EXIT_FAILED) from failure


@app.command(
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def capacity(context: typer.Context) -> None:
    """Show what a model's KV cache costs and how many sequences fit."""
    command = [sys.executable, "-P", "-m", "loraplex.engine.build.capacity", *context.args]
    raise typer.Exit(subprocess.run(command, check=False).returncode)


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


def gather_mappings(given: dict[str, Any]) -> None:
    """Turns repeatable options into their settings, in place.

    Raises:
        SettingsRefused: for malformed values and for names that are given twice.
    """
    faults: list[str] = []
    for setting, form in MAPPINGS.items():
        option = option_of(setting)
        values = given.pop(option.replace("-", "_"), None)
        if values is not None:
            given[setting], found = _as_mapping(values, option, form)
            faults += found
    if faults:
        raise SettingsRefused(faults)


def _as_mapping(values: list[str], option: str, form: str) -> tuple[dict[str, str], list[str]]:
    """Returns the mapping and its faults."""
    pairs = [value.partition("=") for value in values]
    names = Counter(name for name, equals, _ in pairs if equals)
    faults = [
        f"--{option} takes {form}, got {name!r}"
        for name, equals, value in pairs
        if not (name and equals and value)
    ]
    faults += [
        f"--{option} {name} is given {count} times" for name, count in names.items() if count > 1
    ]
    return {name: value for name, _, value in pairs}, faults


def _complain(faults: list[str], status: int) -> typer.Exit:
    for fault in faults:
        console.print(f"loraplex: {fault}", style="red", markup=False, soft_wrap=True)
    return typer.Exit(status)


def main() -> None:
    app()
