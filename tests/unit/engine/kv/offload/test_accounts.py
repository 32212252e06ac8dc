"""What is offloaded is told apart by tenant, and the parts add up to the whole."""

from pathlib import Path

from support.engine.offloading import OffloadingHarness
from support.engine.scheduling import Setup, generate_request

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]


def use(harness: OffloadingHarness, tenant: str, prompt: list[int]) -> None:
    name = f"{tenant} {len(harness.answers)}"
    harness.add(generate_request(name, prompt, tenant=tenant, namespace=tenant, max_tokens=2))
    harness.run(max_steps=1_000_000)


def test_bytes_offloaded_are_those_of_the_tenant_whose_blocks_they_are(tmp_path: Path) -> None:
    harness = OffloadingHarness(Setup(num_blocks=24), num_host_slots=12, folder=tmp_path)
    for round_ in range(3):
        use(harness, "steady", PROMPT)
        harness.flush_device()
        for number in range(4):
            use(harness, "flood", [number, round_, *PROMPT])
    harness.flush_device()
    assert harness.offload.disk is not None
    harness.offload.disk.flush()

    counts, usage = harness.offload.stats(), harness.offload.bytes_by_account()
    steady, flood = (harness.kv.pool.metering.of(name) for name in ("steady", "flood"))

    assert usage.keys() == {"steady", "flood"}
    assert sum(usage.values()) == counts.host_bytes + counts.disk_bytes
    assert counts.disk_bytes > 0
    assert steady.offloaded_bytes + flood.offloaded_bytes == counts.out_bytes
    assert flood.offloaded_bytes > steady.offloaded_bytes > 0
    assert steady.fetched_bytes == counts.in_bytes > 0 == flood.fetched_bytes
    harness.close()
