"""AdapterRef: which adapter, exactly. Torch-free."""

import msgspec


class AdapterRef(msgspec.Struct, frozen=True, kw_only=True):
    """Names one immutable version of one tenant's adapter. Equality and hash are by all three."""

    tenant: str
    adapter_id: str
    digest: str  # SHA-256 over the config that matters and the weights
