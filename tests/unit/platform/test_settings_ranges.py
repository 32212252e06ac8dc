"""Each kind of setting refuses what it cannot be, at the start and by its name."""

from pathlib import Path
from typing import Any, get_args

import pytest
from annotated_types import Ge

from loraplex.engine.config import EngineConfig
from loraplex.platform.config import Settings, load_settings, option_of
from loraplex.platform.errors import SettingsRefused


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def settings_of(kind: type) -> list[str]:
    """Also where the kind is one of several, or has checks of its own."""
    return [
        name
        for name, field in Settings.model_fields.items()
        if kind is field.annotation or kind in get_args(field.annotation)
    ]


def refusal(model: Path, name: str, value: Any) -> str:
    with pytest.raises(SettingsRefused) as caught:
        load_settings({"model": str(model), name: value})
    return str(caught.value.faults)


@pytest.mark.parametrize("value", ["inf", "-inf", "nan", "1e400", "x", "-1"])
@pytest.mark.parametrize("name", settings_of(float))
def test_seconds_are_finite_and_not_negative(model: Path, name: str, value: str) -> None:
    assert f"--{option_of(name)} (" in refusal(model, name, value)


@pytest.mark.parametrize("value", ["1.5.1", "x", "inf", "-9223372036854775809"])
@pytest.mark.parametrize("name", settings_of(int))
def test_whole_numbers_are_whole_and_in_range(model: Path, name: str, value: str) -> None:
    assert f"--{option_of(name)} (" in refusal(model, name, value)


SHARED = sorted({*EngineConfig.__struct_fields__} & Settings.model_fields.keys() - {"seed"})
LOWEST = [
    (name, bound.ge)
    for name in SHARED
    for bound in Settings.model_fields[name].metadata
    if isinstance(bound, Ge)
]


@pytest.mark.parametrize(("name", "low"), LOWEST)
def test_the_engine_has_the_same_lower_bound(model: Path, name: str, low: float) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least {low}, got"):
        EngineConfig(model=str(model), adapter_store="", **{name: low - 0.0001})


def test_threads_are_limited(model: Path) -> None:
    assert "less than or equal to 1024" in refusal(model, "num_threads", "100000")


@pytest.mark.parametrize("key", ["", "a ", " a", "a\n", "a b", "ké", "\t"])
def test_a_key_that_no_header_can_carry_is_refused(model: Path, key: str) -> None:
    told = refusal(model, "api_key", key)

    assert "without blanks or line breaks" in told
    assert not key.strip() or repr(key) not in told


def test_a_key_of_the_environment_is_not_shown(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LORAPLEX_API_KEY", "secret-of-the-environment")

    assert load_settings({"model": str(model)}).pasted_key == '"$LORAPLEX_API_KEY"'
    assert load_settings({"model": str(model), "api_key": "b"}).pasted_key == "b"
