"""Sets tenants' shares: floors and ceilings of KV blocks, and weights of their turns."""

from loraplex.engine.errors import RequestRejected
from loraplex.engine.protocol import FailureCode, SetTenantShares, TenantSharesSet
from loraplex.engine.scheduling.scheduler import Scheduler


def set_tenant_shares(scheduler: Scheduler, command: SetTenantShares) -> TenantSharesSet:
    """Changes floors, ceilings and weights from the next step on.

    Raises:
        RequestRejected: with every fault; then nothing has been changed.
    """
    faults = scheduler.kv.pool.set_shares(command.shares)
    if faults:
        message = "; ".join(faults)
        raise RequestRejected(FailureCode.INVALID_REQUEST, message, "shares", faults)
    for share in command.shares:
        scheduler.policy.ledger.set_weight(share.tenant, share.weight)
    return TenantSharesSet(command.request_id)
