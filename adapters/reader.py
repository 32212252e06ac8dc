"""AdapterReader: reads a folder, or its stored copy, into weights that can be served."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from loraplex.adapters.checks.catalogue import TargetKind
from loraplex.adapters.checks.checker import AdapterChecker
from loraplex.adapters.checks.plan import AdapterPlan
from loraplex.adapters.checks.safetensors_header import MAX_HEADER_BYTES
from loraplex.adapters.errors import AdapterError, AdapterRejected, AdapterUnavailable
from loraplex.adapters.folder import WEIGHTS_NAME
from loraplex.adapters.injection import LoRASites
from loraplex.adapters.manifest import MAX_RANK, AdapterManifest
from loraplex.adapters.registration import StoredCopy
from loraplex.adapters.store import AdapterStore, StagedAdapter, digest_of
from loraplex.adapters.weights import LoRAWeights, ReadWeights, read_weights

_LARGEST_ITEM = 8  # bytes of a float64

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReadAdapter:
    """One adapter, checked and in host memory."""

    digest: str
    manifest: AdapterManifest
    weights: LoRAWeights


Judgement = Callable[[ReadAdapter], None]  # raises AdapterRejected


class AdapterReader:
    """Reads adapters. Its methods block, and may be called from several threads.

    Args:
        sites: the injected model's LoRA layers.
        root: the folder of the store.
        added_tokens: what the base model's own tokenizer adds to its vocabulary.
    """

    def __init__(self, sites: LoRASites, root: Path, added_tokens: Mapping[str, int]) -> None:
        self._sites = sites
        self._base = sites.catalogue.fingerprint
        self._store = AdapterStore(root)
        self._checker = AdapterChecker(sites.catalogue, dict(added_tokens))

    def read_folder(self, source: Path, judge: Judgement) -> ReadAdapter:
        """Reads a PEFT folder and stores a copy of it, unless `judge` refuses it.

        Raises:
            AdapterRejected: with every fault found.
            AdapterUnavailable: the store cannot be used, or nothing can be judged now.
        """
        try:
            with self._store.stage(source, self._max_file_bytes()) as staged:
                identity = self._checker.identify(staged.folder, source)
                digest = digest_of(identity.fingerprint, staged.weights_sha256)
                plan = self._store.plan(digest, self._base) or self._checker.plan(staged.folder)
                read = ReadAdapter(digest, identity.manifest, self._read_staged(staged, plan))
                judge(read)
                self._store.publish(staged, digest, plan)
                return read
        except OSError as error:
            raise AdapterUnavailable("the adapter store cannot be used") from error

    def read_copy(self, copy: StoredCopy, judge: Judgement) -> ReadAdapter:
        """Reads an adapter from the store and compares it with its digest. A damaged copy is made
        again from its origin, if that still has the same content.

        Raises:
            AdapterRejected: the adapter does not fit this base model, or `judge` refuses it.
            AdapterUnavailable: the copy is gone or damaged, and cannot be mended.
        """
        try:
            read = self._read_copy(copy.digest)
        except AdapterUnavailable as error:
            logger.warning("Adapter copy %s: %s", copy.digest, error)
            return self._mend(copy, error, judge)
        judge(read)
        return read

    def plans(self, limit: int) -> list[AdapterPlan]:
        """Returns the plans of the most recent copies that were checked for this base model."""
        return self._store.plans(self._base, limit)

    def close(self) -> None:
        """Ends the process that checks adapters."""
        self._checker.close()

    def _read_copy(self, digest: str) -> ReadAdapter:
        plan = self._store.plan(digest, self._base)
        if plan is None:
            plan = self._check_copy(digest)
        with self._store.open_weights(digest) as file:
            try:
                read = self._read(file, plan)
            except (AdapterRejected, OSError) as error:
                raise AdapterUnavailable("the stored copy of the adapter is damaged") from error
        if digest_of(plan.manifest.fingerprint, read.sha256) != digest:
            raise AdapterUnavailable("the stored copy of the adapter is damaged")
        if read.faults:
            raise AdapterRejected(read.faults)
        self._store.keep_plan(digest, plan)
        return ReadAdapter(digest, plan.manifest, read.weights)

    def _check_copy(self, digest: str) -> AdapterPlan:
        """Raises AdapterUnavailable where the copy is not what its digest says, whatever other
        faults it has."""
        with self._store.open_weights(digest):
            folder = self._store.folder(digest)
        try:
            return self._checker.plan(folder)
        except AdapterRejected as error:
            if not self._store.is_sound(digest):
                raise AdapterUnavailable("the stored copy of the adapter is damaged") from error
            raise

    def _mend(self, copy: StoredCopy, why: AdapterUnavailable, judge: Judgement) -> ReadAdapter:
        if copy.origin is None:
            raise why

        def same(read: ReadAdapter) -> None:
            if read.digest != copy.digest:
                raise AdapterRejected(["the content of the folder has changed"])
            judge(read)

        try:
            read = self.read_folder(copy.origin, same)
        except AdapterError as error:
            raise AdapterUnavailable(
                f"{why}, and cannot be made again from the folder that it came from: {error}"
            ) from error
        logger.warning("Adapter copy %s was made again from its source", copy.digest)
        return read

    def _read_staged(self, staged: StagedAdapter, plan: AdapterPlan) -> LoRAWeights:
        with (staged.folder / WEIGHTS_NAME).open("rb") as file:
            read = self._read(file, plan)
        if read.sha256 != staged.weights_sha256:
            raise AdapterUnavailable("the adapter's copy changed while it was read")
        if read.faults:
            raise AdapterRejected(read.faults)
        return read.weights

    def _read(self, file: BinaryIO, plan: AdapterPlan) -> ReadWeights:
        return read_weights(
            file,
            plan,
            self._sites.dtype,
            self._sites.embedding_weight,
            pin_memory=self._sites.device.type == "cuda",
        )

    def _max_file_bytes(self) -> int:
        total = MAX_HEADER_BYTES
        for module in self._sites.catalogue.modules.values():
            numbers = MAX_RANK * (module.in_features + module.out_features)
            if module.kind is not TargetKind.LINEAR:
                numbers += module.in_features * module.out_features  # PEFT's copy of the base
            total += numbers * _LARGEST_ITEM
        return total
