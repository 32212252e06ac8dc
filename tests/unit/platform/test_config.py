"""Settings: where they come from, and what is refused."""

from pathlib import Path

import pytest

from loraplex.engine.config import EngineConfig, HangLimits
from loraplex.platform.cli import OPTIONS, gather_mappings
from loraplex.platform.config import Settings, load_settings
from loraplex.platform.errors import SettingsRefused
from loraplex.platform.setting_types import parse_size


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that looks like a checkpoint; the environment holds no setting but the home."""
    for name in Settings.model_fields:
        monkeypatch.delenv(f"LORAPLEX_{name.upper()}", raising=False)
    monkeypatch.setenv("LORAPLEX_HOME", str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def test_the_command_line_wins_over_the_environment_and_that_over_the_default(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LORAPLEX_PORT", "9001")
    monkeypatch.setenv("LORAPLEX_MAX_NUM_SEQS", "9")

    settings = load_settings({"model": str(model), "port": "9002"})

    assert (settings.port, settings.max_num_seqs, settings.block_size) == (9002, 9, 8)


def test_a_key_is_made_where_none_is_given(model: Path) -> None:
    first, second = (load_settings({"model": str(model)}).key for _ in range(2))

    assert first.startswith("lpx_")
    assert len(first) > 40
    assert first != second
    assert load_settings({"model": str(model), "api_key": "mine"}).key == "mine"


def test_a_key_is_not_shown_by_accident(model: Path) -> None:
    settings = load_settings({"model": str(model), "api_key": "very-secret"})

    assert "very-secret" not in repr(settings)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1024", 1024),
        ("2GiB", 2 << 30),
        ("2gib", 2 << 30),
        ("1.5 MiB", 3 << 19),
        ("500MB", 500_000_000),
        ("4k", 4000),
    ],
)
def test_sizes_have_units(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "lots", "2TB", "-1", "1e9", "GiB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="500MB or 2GiB"):
        parse_size(text)


def test_a_variable_that_is_no_setting_is_refused_by_name(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LORAPLEX_PROT", "8000")

    with pytest.raises(SettingsRefused, match="LORAPLEX_PROT"):
        load_settings({"model": str(model)})


def test_all_faults_are_told_with_option_and_variable(model: Path) -> None:
    with pytest.raises(SettingsRefused) as caught:
        load_settings({"model": str(model), "port": "x", "device": "tpu", "adapters": {"a/b": "."}})

    told = [fault.partition(":")[0] for fault in caught.value.faults]
    assert told == [
        "--adapter (LORAPLEX_ADAPTERS) a/b",
        "--port (LORAPLEX_PORT)",
        "--device (LORAPLEX_DEVICE)",
    ]


def test_the_engine_gets_what_concerns_it(model: Path) -> None:
    settings = load_settings({"model": str(model), "kv_cache_memory": "1MiB", "seed": "5"})

    config = settings.engine_config()

    assert (config.model, config.kv_cache_memory, config.seed) == (str(model), 1 << 20, 5)
    assert config.adapter_store == str(model / "adapters")


def test_the_engines_defaults_are_those_of_the_settings(model: Path) -> None:
    settings = load_settings({"model": str(model)})

    untouched = EngineConfig(model=str(model), adapter_store=str(settings.adapter_store))
    assert settings.engine_config() == untouched
    assert settings.hang_limits() == HangLimits()


def test_every_setting_of_the_engine_is_an_option(model: Path) -> None:
    inner = {"adapter_store", "adapter_wait"}  # for tests and for the server itself

    assert {
        *EngineConfig.__struct_fields__
    } - inner <= OPTIONS.keys() & Settings.model_fields.keys()


def test_options_that_are_given_many_times_become_one_setting() -> None:
    given = {"adapter": ["a=x", "b=y=z"], "base_prompt": ["p=f"], "port": "1"}

    gather_mappings(given)

    assert given == {"adapters": {"a": "x", "b": "y=z"}, "base_prompts": {"p": "f"}, "port": "1"}


def test_every_fault_of_these_options_is_told() -> None:
    given = {"adapter": ["a", "=x", "b=", "c=1", "c=2"], "adapter_base_prompt": ["a=p", "q"]}

    with pytest.raises(SettingsRefused) as caught:
        gather_mappings(given)

    assert caught.value.faults == [
        "--adapter takes NAME=FOLDER, got 'a'",
        "--adapter takes NAME=FOLDER, got ''",
        "--adapter takes NAME=FOLDER, got 'b'",
        "--adapter c is given 2 times",
        "--adapter-base-prompt takes ADAPTER=BASE_PROMPT, got 'q'",
    ]


def test_adapters_and_base_prompts_are_named_as_they_were_given(model: Path) -> None:
    (model / "prompt.txt").write_text("Be brief.")

    with pytest.raises(SettingsRefused) as caught:
        load_settings(
            {
                "model": str(model),
                "adapters": {"a": str(model)},
                "base_prompts": {"p": str(model / "prompt.txt"), "q": str(model / "none.txt")},
                "adapter_activations": {"b": "after_prompt"},
                "adapter_base_prompts": {"a": "r"},
            }
        )

    told = "; ".join(caught.value.faults)
    assert "there is no file" in told
    assert "--adapter-activation (LORAPLEX_ADAPTER_ACTIVATIONS): there is no adapter b" in told


def test_an_adapter_and_its_base_prompt_must_both_be_given(model: Path) -> None:
    with pytest.raises(SettingsRefused, match="there is no adapter b; there is no base prompt r"):
        load_settings(
            {
                "model": str(model),
                "adapters": {"a": str(model)},
                "adapter_base_prompts": {"b": "r"},
            }
        )
