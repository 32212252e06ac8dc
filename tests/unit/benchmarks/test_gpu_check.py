"""The GPU check finds what is wrong, and its whole path runs without a GPU."""

import importlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from triton.runtime.errors import OutOfResources

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The modules of the check, which are found from its folder."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    names = ("case", "judge", "record", "table")
    modules = [importlib.import_module(f"gpu.{name}") for name in names]
    return SimpleNamespace(**{k: v for module in modules for k, v in vars(module).items()})


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("gpu.child")


EXPECTED = 1 + torch.arange(2000.0).view(500, 4).sin()


def with_a_wrong_row() -> torch.Tensor:
    out = EXPECTED.clone()
    out[3] += 0.3
    return out


def with_a_nan() -> torch.Tensor:
    out = EXPECTED.clone()
    out[0, 0] = torch.nan
    return out


def unwritten() -> torch.Tensor:
    out = torch.empty(500, 4)
    out[1:] = EXPECTED[1:]
    return out


def never_the_same() -> torch.Tensor:
    return EXPECTED + 1e-6 * torch.rand(500, 4)


@pytest.mark.parametrize(
    ("run", "floor", "ok"),
    [
        (EXPECTED.clone, 0.0, True),
        (lambda: EXPECTED * 1.0009, 1e-3, True),
        (lambda: EXPECTED * 1.002, 1e-3, False),
        (with_a_wrong_row, 2e-2, False),
        (with_a_nan, 1e9, False),
        (unwritten, 1e9, False),
        (never_the_same, 1e-3, False),
    ],
)
def test_a_result_is_judged_as_a_whole_by_row_and_by_its_bits(
    gpu: SimpleNamespace, run: Callable[[], torch.Tensor], floor: float, ok: bool
) -> None:
    case = gpu.Case("case", run, EXPECTED.clone, floor)

    assert gpu.judge(case).ok is ok


def test_a_goal_follows_from_what_the_machine_can_do(gpu: SimpleNamespace) -> None:
    ceilings = gpu.Ceilings(copy=4e12, read=2.5e12, matmul=8e14)

    by_bytes = gpu.Goal(0.8).seconds(4e9, 0, ceilings)
    by_flops = gpu.Goal(0.5, launches=2).seconds(0, 8e11, ceilings)
    fixed = gpu.Goal(1, at_most=1e-5).seconds(4e9, 0, ceilings)

    assert by_bytes == pytest.approx(1e-3 / 0.8)
    assert by_flops == pytest.approx(2e-3 + 3e-6)
    assert fixed == 1e-5


def test_the_table_shows_what_is_wrong_and_what_was_missed(gpu: SimpleNamespace) -> None:
    lines = gpu.table(
        [
            {"group": "g", "case": "fine", "ok": True, "error": 1e-4},
            {"group": "g", "case": "wrong", "ok": False, "error": 0.5},
            {"group": "g", "case": "slow", "ok": True, "seconds": 2e-5, "goal": 1e-5, "met": False},
        ]
    ).splitlines()

    assert lines[2:] == [
        "| g | wrong | NO | 5.0e-01 |  |  |  |  |  |  |",
        "| g | slow | yes |  | 20.0 |  |  | 10.0 | no |  |",
        "| g | 1 more, all right; largest error 1.0e-04 |  |  |  |  |  |  |  |  |",
    ]


def test_the_table_splits_a_step_into_its_parts(gpu: SimpleNamespace) -> None:
    parts = {"gpu": 1e-3, "schedule": 2e-5}
    line = gpu.table([{"group": "g", "case": "c", "seconds": 1.5e-3, "parts": parts}])

    assert "gpu 1000.0 us; schedule 20.0 us" in line


def test_a_kind_of_step_that_did_not_occur_is_a_failure(
    gpu: SimpleNamespace,
) -> None:
    clock = importlib.import_module("gpu.step_clock")
    machine = gpu.Machine(torch.device("cpu"), None, False)
    slow, fast = (
        clock.Step(seconds, {"schedule": seconds / 2}, 1, 1, 0, 0, 0) for seconds in (3.0, 1.0)
    )

    assert clock.medians([], machine)["ok"] is False
    assert clock.medians([slow, fast, fast], machine) == {
        "ok": True,
        "steps": 3,
        "seconds": 1.0,
        "slowest": 3.0,
        "parts": {"schedule": 0.5},
    }


def test_records_are_whole_after_each(gpu: SimpleNamespace, tmp_path: Path) -> None:
    records = gpu.Records(tmp_path / "out.json")
    records.write({"interpreted": True, "records": []})

    records.add("g", "case", ok=True)

    assert json.loads((tmp_path / "out.json").read_text())["records"] == [
        {"group": "g", "case": "case", "ok": True}
    ]


@pytest.mark.parametrize(
    ("error", "is_fatal"),
    [
        (RuntimeError("CUDA error: an illegal memory access was encountered"), True),
        (torch.AcceleratorError("an illegal memory access", 700), True),
        (RuntimeError("No available kernel. Aborting execution."), False),
        (OutOfResources(200_000, 100_000, "shared memory"), False),
    ],
)
def test_what_breaks_the_gpu_for_a_process_is_told_from_what_fails_alone(
    child: ModuleType, error: Exception, is_fatal: bool
) -> None:
    assert child.is_fatal(error) is is_fatal


def broken() -> torch.Tensor:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_a_case_that_breaks_the_gpu_is_left_and_the_next_process_goes_on_behind_it(
    gpu: SimpleNamespace, child: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = EXPECTED.clone
    runs = {"first": good, "breaks": broken, "last": good}
    cases = [gpu.Case(name, run, EXPECTED.clone, 0.0) for name, run in runs.items()]
    monkeypatch.setattr(child, "make_cases", lambda *_: iter(cases))
    records = gpu.Records(tmp_path / "out.json")
    records.write({"records": []})

    statuses = [child.run("g", records, True, 60.0) for _ in range(2)]

    assert statuses == [child.BROKEN, 0]
    assert [(r["case"], r["ok"]) for r in records.all()] == [
        ("first", True),
        ("breaks", False),
        ("last", True),
    ]


@pytest.mark.parametrize(("may_not_fit", "ok"), [(True, None), (False, False)])
def test_a_tile_too_large_for_the_gpu_is_a_fault_only_where_it_is_in_use(
    gpu: SimpleNamespace,
    child: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    may_not_fit: bool,
    ok: bool | None,
) -> None:
    def too_large() -> torch.Tensor:
        raise OutOfResources(200_000, 100_000, "shared memory")

    case = gpu.Case("large", too_large, EXPECTED.clone, 0.0, may_not_fit=may_not_fit)
    monkeypatch.setattr(child, "make_cases", lambda *_: iter([case]))
    records = gpu.Records(tmp_path / "out.json")
    records.write({"records": []})

    child.run("g", records, True, 60.0)

    (record,) = records.all()
    assert record.get("ok") is ok
    assert "shared memory" in record["why"]


def test_a_group_that_breaks_off_while_cases_are_made_is_recorded_with_its_trace(
    gpu: SimpleNamespace, child: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(*_: object) -> Iterator[object]:
        yield gpu.Case("first", EXPECTED.clone, EXPECTED.clone, 0.0)
        raise OutOfResources(200_000, 100_000, "shared memory")

    monkeypatch.setattr(child, "make_cases", make)
    records = gpu.Records(tmp_path / "out.json")
    records.write({"records": []})

    child.run("g", records, True, 60.0)

    last = records.all()[-1]
    assert (last["case"], last["ok"]) == ("broke off", False)
    assert "OutOfResources" in last["trace"]


def interpret(tmp_path: Path, *options: str) -> tuple[int, list[dict[str, object]]]:
    """-> exit status, and the records."""
    out = tmp_path / "check.json"
    command = [sys.executable, BENCHMARKS / "gpu_check.py", "--interpret", "--json", out, *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert out.exists(), done.stderr
    return done.returncode, json.loads(out.read_text())["records"]


def test_a_group_runs_on_tiny_shapes_without_a_gpu(tmp_path: Path) -> None:
    status, records = interpret(tmp_path, "--only", "robust")

    verdicts = [record["ok"] for record in records if record["group"] == "robust"]
    assert verdicts.count(True) >= 9
    assert (status, verdicts.count(False)) == (0, 0)


def test_a_group_that_does_not_end_in_time_is_a_failure(tmp_path: Path) -> None:
    status, records = interpret(tmp_path, "--only", "robust", "--budget", "0")

    assert status == 1
    assert records[-1] == {
        "group": "robust",
        "case": "not run",
        "ok": False,
        "why": "the budget is spent",
    }


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_everything_runs_on_tiny_shapes_without_a_gpu(tmp_path: Path) -> None:
    status, records = interpret(tmp_path, "--budget", "1700")

    groups = {record["group"] for record in records if record.get("ok")}
    assert status == 0
    expected = {"decode", "prefill", "lora", "cache", "rows", "robust", "engine", "offload"}
    assert groups == expected | {"steps", "sweep", "sanitizer"}
