"""The command line: `loraplex serve`, `loraplex capacity`."""

import subprocess
import sys
from collections import Counter
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
    """A command line option with the text and the default of its setting."""
    field = Settings.model_fields[setting]
    shown = "none" if field.default is None or field.default == {} else field.default
    note = "must be given" if field.is_required() else f"default: {shown}"
    return typer.Option(
        f"--{option_of(setting)}",
        metavar=metavar,
        help=f"{field.description} [{note}]",
        show_default=False,
    )


Text = str | None  # Settings reads the values, so that it can name all faults at once
Texts = list[str] | None  # of an option that can be given many times


@app.command()
def serve(  # noqa: PLR0913 - one parameter per option
    *,
    model: Annotated[Text, option("model", "FOLDER")] = None,
    served_model_name: Annotated[Text, option("served_model_name", "NAME")] = None,
    adapter: Annotated[Texts, option("adapters", "NAME=FOLDER")] = None,
    allow_base_mismatch: Annotated[bool, option("allow_base_mismatch", "")] = False,
    base_prompt: Annotated[Texts, option("base_prompts", "NAME=FILE")] = None,
    adapter_activation: Annotated[
        Texts, option("adapter_activations", "ADAPTER=ACTIVATION")
    ] = None,
    adapter_base_prompt: Annotated[
        Texts, option("adapter_base_prompts", "ADAPTER=BASE_PROMPT")
    ] = None,
    host: Annotated[Text, option("host", "HOST")] = None,
    port: Annotated[Text, option("port", "PORT")] = None,
    api_key: Annotated[Text, option("api_key", "KEY")] = None,
    max_body_size: Annotated[Text, option("max_body_size", "BYTES")] = None,
    max_connections: Annotated[Text, option("max_connections", "N")] = None,
    max_connections_per_address: Annotated[Text, option("max_connections_per_address", "N")] = None,
    request_timeout: Annotated[Text, option("request_timeout", "SECONDS")] = None,
    send_timeout: Annotated[Text, option("send_timeout", "SECONDS")] = None,
    max_unread: Annotated[Text, option("max_unread", "BYTES")] = None,
    keep_alive_timeout: Annotated[Text, option("keep_alive_timeout", "SECONDS")] = None,
    shutdown_timeout: Annotated[Text, option("shutdown_timeout", "SECONDS")] = None,
    dtype: Annotated[Text, option("dtype", "auto|float32|bfloat16|float16")] = None,
    device: Annotated[Text, option("device", "auto|cpu|cuda")] = None,
    max_model_len: Annotated[Text, option("max_model_len", "N")] = None,
    max_num_seqs: Annotated[Text, option("max_num_seqs", "N")] = None,
    max_num_batched_tokens: Annotated[Text, option("max_num_batched_tokens", "N")] = None,
    kv_cache_memory: Annotated[Text, option("kv_cache_memory", "BYTES")] = None,
    block_size: Annotated[Text, option("block_size", "N")] = None,
    kv_group_size: Annotated[Text, option("kv_group_size", "N")] = None,
    swap_memory: Annotated[Text, option("swap_memory", "BYTES")] = None,
    swap_disk: Annotated[Text, option("swap_disk", "BYTES")] = None,
    eviction: Annotated[Text, option("eviction", "cost|lru")] = None,
    eviction_half_life: Annotated[Text, option("eviction_half_life", "SECONDS")] = None,
    scheduling: Annotated[Text, option("scheduling", "fair|fcfs")] = None,
    max_adapter_slots: Annotated[Text, option("max_adapter_slots", "N")] = None,
    adapter_memory: Annotated[Text, option("adapter_memory", "BYTES")] = None,
    seed: Annotated[Text, option("seed", "N")] = None,
    hang_timeout: Annotated[Text, option("hang_timeout", "SECONDS")] = None,
    step_timeout: Annotated[Text, option("step_timeout", "SECONDS")] = None,
    num_threads: Annotated[Text, option("num_threads", "N")] = None,
    kernels: Annotated[Text, option("kernels", "auto|naive|triton")] = None,
    quantization: Annotated[Text, option("quantization", "none|int8")] = None,
) -> None:
    """Serve a model and its adapters over an OpenAI-compatible API.

    Every option can also be set as an environment variable: --max-model-len is
    LORAPLEX_MAX_MODEL_LEN. Data lives under LORAPLEX_HOME, by default ~/.loraplex.
    """
    given = {name: value for name, value in locals().items() if value not in (None, False)}
    _serve(given)


@app.command(
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def capacity(context: typer.Context) -> None:
    """Say what a model's KV cache costs and how many sequences fit."""
    command = [sys.executable, "-P", "-m", "loraplex.engine.build.capacity", *context.args]
    raise typer.Exit(subprocess.run(command, check=False).returncode)


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


def gather_mappings(given: dict[str, Any]) -> None:
    """Turns the options that can be given many times into their settings, in place.

    Raises:
        SettingsRefused: for values of another form, and for names that are given twice.
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


def _serve(given: dict[str, Any]) -> None:
    try:
        gather_mappings(given)
        uvloop.run(serve_until_stopped(load_settings(given), console))
    except SettingsRefused as refusal:
        raise _complain(refusal.faults, EXIT_REFUSED) from refusal
    except StartFailed as failure:
        raise _complain(failure.faults, EXIT_FAILED) from failure


def _as_mapping(values: list[str], option: str, form: str) -> tuple[dict[str, str], list[str]]:
    """The mapping, and what is wrong with it."""
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
