"""Every Redis key, channel and consumer group that more than one process must agree on, with type and lifetime.

`namespace` isolates one installation (or one test) from another on the same servers; empty in production.
"""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID


def prefixed(namespace: str, name: str) -> str:
    """`name` inside the namespace: unchanged when that is empty, else `<namespace>.<name>`."""
    return f"{namespace}.{name}" if namespace else name


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisKeys:
    """Key shapes of one namespace.

    The part in braces is the hash tag: all keys one script touches share a customer, hence a cluster slot.
    """

    namespace: str = ""

    def bucket(self, customer_id: str, bucket: str) -> str:
        """String: state of a GCRA bucket, "<time of arrival> <interval> <written at>", microseconds; expires when the
        bucket is full again."""
        return prefixed(self.namespace, f"limit:{{{customer_id}}}:{bucket}")

    def places(self, customer_id: str, owner: str) -> str:
        """Sorted set: unfinished requests of a key or customer, by the microsecond from which a place is free; expires
        with the last of them."""
        return prefixed(self.namespace, f"places:{{{customer_id}}}:{owner}")

    def money(self, customer_id: str) -> str:
        """Hash: what requests may still cost, in millionths, by second of admission; no expiry, since an absent one
        means that nothing is known."""
        return prefixed(self.namespace, f"money:{{{customer_id}}}")

    def revoked_keys(self, customer_id: str) -> str:
        """Set of revoked key ids of a customer; no expiry. Read inside the limiter's own call."""
        return prefixed(self.namespace, f"revoked:{{{customer_id}}}")

    def revoked_whole(self) -> str:
        """String: run id of the server into which every revoked key was put since it was started; no expiry."""
        return prefixed(self.namespace, "revoked-whole:{all}")

    def revoked_repair(self, repair: str) -> str:
        """String: as above, while a repair of that name puts them in; expires if the repair dies."""
        return prefixed(self.namespace, f"revoked-repair:{{all}}:{repair}")

    def result(self, request_id: UUID) -> str:
        """String: framed InferenceFinished; first writer wins; expires after the result's lifetime."""
        return prefixed(self.namespace, f"result:{request_id}")

    def results_channel(self, api_instance: str) -> str:
        """Channel: concatenated 16-byte ids of requests whose results are ready, for one API instance."""
        return prefixed(self.namespace, f"results:{api_instance}")


def worker_group(namespace: str, pool: str) -> str:
    """Consumer group of a pool's workers."""
    return prefixed(namespace, f"workers.{pool}")


def ledger_group(namespace: str) -> str:
    """Consumer group (and Faust app id) of the usage ledger."""
    return prefixed(namespace, "usage-ledger")
