"""What is swapped is told apart by tenant, and the parts add up to the whole."""

from pathlib import Path

from support.engine.scheduling import Setup, generate_request
from support.engine.swapping import SwappingHarness

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]


def use(harness: SwappingHarness, tenant: str, prompt: list[int]) -> None:
    name = f"{tenant} {len(harness.answers)}"
    harness.add(generate_request(name, prompt, tenant=tenant, namespace=tenant, max_tokens=2))
    harness.run(max_steps=1_000_000)


def test_bytes_swapped_are_those_of_the_tenant_whose_blocks_they_are(tmp_path: Path) -> None:
    harness = SwappingHarness(Setup(num_blocks=24), num_host_slots=12, folder=tmp_path)
    for round_ in range(3):
        use(harness, "steady", PROMPT)
        harness.flush_device()
        for number in range(4):
            use(harness, "flood", [number, round_, *PROMPT])
    harness.flush_device()
    assert harness.swap.disk is not None
    harness.swap.disk.flush()

    counts, usage = harness.swap.stats(), harness.swap.bytes_by_account()
    steady, flood = (harness.kv.pool.metering.of(name) for name in ("steady", "flood"))

    assert usage.keys() == {"steady", "flood"}
    assert sum(usage.values()) == counts.host_bytes + counts.disk_bytes
    assert counts.disk_bytes > 0
    assert steady.swapped_out_bytes + flood.swapped_out_bytes == counts.out_bytes
    assert flood.swapped_out_bytes > steady.swapped_out_bytes > 0
    assert steady.swapped_in_bytes == counts.in_bytes > 0 == flood.swapped_in_bytes
    harness.close()
