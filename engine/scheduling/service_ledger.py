"""ServiceLedger: each tenant's service, in tokens and as one weighted number."""

from dataclasses import dataclass

PREFILL_PRICE = 1.0
DECODE_PRICE = 2.0  # a decode token costs a pass of its own, prompt tokens share one
LOAD_BYTES_PER_TOKEN = 1 << 20  # adapter bytes that take as long to place as a prompt token takes


@dataclass
class Service:
    """One tenant's service. `counter` is its virtual token counter: weighted charges and lifts."""

    weight: float = 1.0
    counter: float = 0.0
    prefill_tokens: int = 0  # computed; cached ones are not served
    decode_tokens: int = 0
    loaded_bytes: int = 0  # of adapters, into slots


class ServiceLedger:
    """The virtual token counters of all tenants seen so far."""

    def __init__(self) -> None:
        self._services: dict[str, Service] = {}

    def of(self, tenant: str) -> Service:
        service = self._services.get(tenant)
        if service is None:
            service = self._services[tenant] = Service()
        return service

    @property
    def tenants(self) -> list[str]:
        return list(self._services)

    def set_weight(self, tenant: str, weight: float) -> None:
        """Sets the weight of later charges: a finite number above zero."""
        self.of(tenant).weight = weight

    def charge(self, tenant: str, *, prefill: int = 0, decode: int = 0, loaded: int = 0) -> None:
        """Charges computed prompt tokens, tokens to be sampled and bytes of adapters."""
        service = self.of(tenant)
        service.prefill_tokens += prefill
        service.decode_tokens += decode
        service.loaded_bytes += loaded
        service.counter += price(prefill, decode, loaded) / service.weight

    def lift(self, tenant: str, level: float) -> None:
        """Raises a tenant's counter to `level`, so that an idle time earns no credit."""
        service = self.of(tenant)
        service.counter = max(service.counter, level)


def price(prefill: int, decode: int, loaded: int) -> float:
    """Returns the price of prompt tokens, sampled tokens and adapter bytes, in prompt tokens."""
    return PREFILL_PRICE * prefill + DECODE_PRICE * decode + loaded / LOAD_BYTES_PER_TOKEN
