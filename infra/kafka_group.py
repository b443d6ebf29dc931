"""Whether a consumer's group takes it in, and if not, why: what the client library knows and tells only who asks.

A consumer that is refused tries again only once somebody has heard the refusal. Plain consumers hear it whenever they
ask for records; Faust's never asks in the way that tells it, and so waits for ever.
"""

from __future__ import annotations

from aiokafka import AIOKafkaConsumer
from aiokafka.errors import GroupAuthorizationFailedError, InconsistentGroupProtocolError, KafkaError


def refusal(consumer: AIOKafkaConsumer) -> KafkaError | None:
    """The error with which its group refused this consumer since this was asked last; it then tries again.

    None when there was none. To be asked where the consumer runs.
    """
    if consumer._coordinator is None:  # not started yet
        return None
    try:
        consumer._coordinator.check_errors()
    except KafkaError as error:
        return error
    return None


def is_member(consumer: AIOKafkaConsumer) -> bool:
    """Whether the group has given this consumer its share, which may be nothing."""
    subscription = consumer._subscription.subscription
    if consumer._coordinator is None or subscription is None or not subscription.active:
        return False
    return not consumer._coordinator.need_rejoin(subscription)


def remedy(error: KafkaError) -> str:
    """What an operator can do about a refusal."""
    if isinstance(error, InconsistentGroupProtocolError):
        return "a program of another kind or build is in the group and shares partitions out in another way; end it"
    if isinstance(error, GroupAuthorizationFailedError):
        return "allow its user READ on the group (kafka-acls.sh --add --operation Read --group ...)"
    return "the broker's log says more"
