"""TargetCatalogue: a base model's adaptable modules, and those that a manifest names.
Torch-free."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from loraplex.adapters.checks.regex_match import RegexError, match_all
from loraplex.adapters.errors import AdapterRejected, listed, shown
from loraplex.adapters.manifest import ALL_LINEAR, AdapterManifest

RULES = 1  # rises when the same files get another outcome, so that no old one is used again


class TargetKind(StrEnum):
    LINEAR = "linear"
    EMBEDDING = "embedding"  # token ids in, so in_features is the size of the vocabulary
    LM_HEAD = "lm_head"


@dataclass(frozen=True)
class TargetModule:
    name: str  # as in the model before anything is replaced, for example model.layers.0.mlp.up_proj
    kind: TargetKind
    in_features: int
    out_features: int


@dataclass(frozen=True)
class AdapterTarget:
    """One module that a manifest adapts, with its rank and scale."""

    module: TargetModule
    rank: int
    scaling: float


@dataclass(frozen=True)
class TargetCatalogue:
    """Every module of a base model by name, split by whether LoRA can be served on it."""

    modules: Mapping[str, TargetModule]
    # The rest; the value says whether it is a linear, which "all-linear" means too.
    others: Mapping[str, bool]

    @property
    def fingerprint(self) -> str:
        """Returns SHA-256 over all that a check depends on beside the adapter's files."""
        modules = [
            (module.name, module.kind, module.in_features, module.out_features)
            for module in self.modules.values()
        ]
        text = msgspec.json.encode([RULES, modules, list(self.others.items())])
        return hashlib.sha256(text).hexdigest()

    @property
    def vocab_size(self) -> int:
        """Returns the rows of the input embedding."""
        embeddings = [m for m in self.modules.values() if m.kind is TargetKind.EMBEDDING]
        return embeddings[0].in_features if embeddings else 0

    @property
    def linear_numbers_per_rank(self) -> int:
        """Returns the numbers of A and B for each rank of an adapter on every linear but
        lm_head."""
        return sum(
            module.in_features + module.out_features
            for module in self.modules.values()
            if module.kind is TargetKind.LINEAR
        )

    def resolve(self, manifest: AdapterManifest) -> dict[str, AdapterTarget]:
        """Returns the modules that `manifest` adapts, by name, under PEFT's rules.

        A hostile expression can take exponential time here, so untrusted manifests are resolved in
        a process that can be ended (`checks.judge`).

        Raises:
            AdapterRejected: nothing matches, a name or a pattern matches nothing, or something
                matches that LoRA cannot be served on.
        """
        try:
            return self._resolve(manifest)
        except RegexError as error:
            raise AdapterRejected([str(error)]) from error

    def _resolve(self, manifest: AdapterManifest) -> dict[str, AdapterTarget]:
        names = [*self.modules, *self.others]
        chosen = self._chosen(manifest, names)
        targets = [name for name in chosen if name in self.modules]
        faults = _unmatched_names(manifest, names)
        faults += self._unservable(chosen)
        faults += self._saved_faults(manifest, names)
        faults += self._activation_faults(manifest, targets)
        if not chosen and not faults:
            faults.append("no module of the base model is adapted by this config")
        ranks = _Pattern("rank_pattern", manifest.rank_pattern, targets)
        alphas = _Pattern("alpha_pattern", manifest.alpha_pattern, targets)
        faults += ranks.faults + alphas.faults
        if faults:
            raise AdapterRejected(faults)
        resolved = {}
        for name in targets:
            rank = int(ranks.get(name, manifest.rank))
            root = rank**0.5 if manifest.use_rslora else rank
            scaling = alphas.get(name, manifest.alpha) / root
            resolved[name] = AdapterTarget(self.modules[name], rank, scaling)
        return resolved

    def _chosen(self, manifest: AdapterManifest, names: list[str]) -> list[str]:
        included = self._included(manifest.target_modules, names)
        for left_out in (manifest.exclude_modules, manifest.saved_modules):
            if left_out:
                excluded = set(_named(left_out, names))
                included = [name for name in included if name not in excluded]
        if not manifest.layers_to_transform:
            return included
        layers, in_full = set(manifest.layers_to_transform), set(manifest.target_modules)
        return [
            name
            for name, layer in _layers(manifest, included)
            if layer in layers or name in in_full  # PEFT asks only for the layer of a last part
        ]

    def _included(self, target_modules: tuple[str, ...] | str, names: list[str]) -> list[str]:
        if target_modules != ALL_LINEAR:
            return _named(target_modules, names)
        linears = [m.name for m in self.modules.values() if m.kind is TargetKind.LINEAR]
        return linears + [name for name, is_linear in self.others.items() if is_linear]

    def _unservable(self, chosen: Sequence[str]) -> list[str]:
        bad = [name for name in chosen if name in self.others]
        if not bad:
            return []
        return [
            "LoRA is served on linear layers, the input embedding and lm_head, not on experts, "
            f"routers or other modules: {listed(bad)}"
        ]

    def _saved_faults(self, manifest: AdapterManifest, names: list[str]) -> list[str]:
        """Returns the faults of full copies, which have no effect only where they can be compared
        with the base."""
        comparable = (TargetKind.EMBEDDING, TargetKind.LM_HEAD)
        bad = [
            saved
            for saved in manifest.saved_modules
            if not (found := [name for name in names if name.endswith(saved)])
            or any(
                name not in self.modules or self.modules[name].kind not in comparable
                for name in found
            )
        ]
        if not bad:
            return []
        return [
            "full copies of modules (modules_to_save) are accepted of the input embedding and of "
            f"lm_head, where they equal the base model's, not of {listed(bad)}"
        ]

    def _activation_faults(self, manifest: AdapterManifest, targets: Sequence[str]) -> list[str]:
        if not manifest.invocation_tokens:
            return []
        faults = []
        if any(self.modules[name].kind is TargetKind.EMBEDDING for name in targets):
            faults.append("an activated LoRA (alora_invocation_tokens) cannot adapt an embedding")
        outside = [t for t in manifest.invocation_tokens if t >= self.vocab_size]
        if outside:
            faults.append(
                f"alora_invocation_tokens must be below the vocabulary's {self.vocab_size}, "
                f"got {listed(outside)}"
            )
        return faults


class _Pattern:
    """PEFT's rank_pattern or alpha_pattern, applied to the adapted modules."""

    def __init__(
        self, key: str, pattern: Mapping[str, int] | Mapping[str, float], targets: Sequence[str]
    ) -> None:
        self.faults: list[str] = []
        self._values: dict[str, float] = {}
        rows = match_all("suffix", list(pattern), targets) if pattern else []
        for (expression, value), row in zip(pattern.items(), rows, strict=True):
            matched = [name for name, hit in zip(targets, row, strict=True) if hit is not None]
            if not matched:
                self.faults.append(f"{key}: {shown(expression)} matches no adapted module")
            for name in matched:
                self._values.setdefault(name, value)

    def get(self, name: str, default: float) -> float:
        return self._values.get(name, default)


def _named(selection: tuple[str, ...] | str, names: list[str]) -> list[str]:
    """Returns the names selected by a list of names (whole, or their last parts) or an
    expression."""
    if isinstance(selection, str):
        (row,) = match_all("full", [selection], names)
        return [name for name, hit in zip(names, row, strict=True) if hit is not None]
    ends = tuple(f".{part}" for part in selection)
    whole = set(selection)
    return [name for name in names if name in whole or name.endswith(ends)]


def _unmatched_names(manifest: AdapterManifest, names: list[str]) -> list[str]:
    if manifest.target_modules == ALL_LINEAR:
        return []
    if isinstance(manifest.target_modules, str):
        if _named(manifest.target_modules, names):
            return []
        return [f"target_modules: {shown(manifest.target_modules)} matches no module"]
    unmatched = [part for part in manifest.target_modules if not _named((part,), names)]
    faults = []
    if unmatched:
        faults.append(f"target_modules that match no module of the base model: {listed(unmatched)}")
    if manifest.layers_to_transform and not set(names).issuperset(manifest.target_modules):
        partly = [name for name in names if name not in manifest.target_modules]
        present = {layer for _, layer in _layers(manifest, _named(manifest.target_modules, partly))}
        absent = sorted(set(manifest.layers_to_transform) - present)
        if absent:
            faults.append(f"layers_to_transform that match no adapted layer: {listed(absent)}")
    return faults


def _layers(manifest: AdapterManifest, names: list[str]) -> list[tuple[str, int | None]]:
    """Returns each name with its layer number, by the first layers_pattern that finds one."""
    patterns = manifest.layers_pattern
    rows = match_all("layer", patterns, names) if patterns else match_all("any_layer", [""], names)
    found = []
    for name, column in zip(names, zip(*rows, strict=True), strict=True):
        number = next((hit for hit in column if hit), None)
        found.append((name, None if number is None else int(number)))
    return found
