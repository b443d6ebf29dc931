"""Wires the stream processor: `faust -A streams.app worker -l info` runs the usage ledger.

Everything that decides whether usage can be lost is set here, on purpose and in one place.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import faust
import faust.streams
from faust.exceptions import ConsumerNotStarted

from infra.kafka import BusUnavailable
from infra.postgres import is_outage, open_pool
from infra.schema_feed import SchemaFeed, open_schema_feed
from infra.settings import StreamsSettings, home_dir, streams_settings
from schemas.keys import ledger_group
from schemas.topics import USAGE
from streams.agents import register_usage_agent
from streams.consumer import LedgerTransport
from streams.ledger.delivery import Delivery
from streams.ledger.loop import UsageLoop
from streams.ledger.membership import Membership, Refused
from streams.ledger.positions import settle_positions
from streams.ledger.pruner import Pruner
from streams.ledger.raw import RawRecord
from streams.ledger.stretches import Stretch
from streams.ledger.tables import Ledger
from streams.outbox.relay import Relay
from streams.quarantine.collector import Collector
from streams.usage.watermark import Watermark
from streams.watchdog import Stalled, Watchdog, end_for_certain

log = logging.getLogger(__name__)

_START_PAUSE_S = 1.0


class LedgerApp(faust.App):
    """The Faust app with the ledger's parts; they exist from `on_start` on."""

    settings: StreamsSettings
    delivery: Delivery
    ledger: Ledger
    membership: Membership
    schemas: SchemaFeed
    watchdog: Watchdog
    relay: Relay
    watermark: Watermark

    loop_reader: UsageLoop | None = None

    def assigned(self) -> set[int]:
        """The usage topic's partitions that this process reads."""
        if self.loop_reader is not None:
            return self.loop_reader.assigned()
        try:
            return {tp.partition for tp in self.consumer.assignment()}
        except ConsumerNotStarted:  # raised out of a page, it would end the process
            return set()

    @property
    def moving(self) -> bool:
        """True while the group shares its partitions out anew."""
        return self.rebalancing if self.loop_reader is None else self.loop_reader.rebalancing

    def _new_transport(self) -> Any:
        return LedgerTransport(self.conf.broker_consumer, self)

    async def on_first_start(self) -> None:
        """Faust makes its folder, but not the one that holds it."""
        _require_free(self.settings.health_port)
        home_dir().mkdir(parents=True, exist_ok=True)
        await super().on_first_start()

    async def on_start(self) -> None:
        """Open the pool and settle the positions, before any consumer exists."""
        await super().on_start()
        s = self.settings
        # Beside the ledger, with connections of its own, and before the ledger waits for anything: its run never fails.
        self.relay = Relay(s.kafka, s.postgres)
        self.add_future(self.relay.run())
        pool = await self.add_async_context(open_pool(s.postgres, max_size=2))
        self.ledger = self.new_ledger(pool)
        self.schemas = await self.add_async_context(open_schema_feed(s.kafka))
        self.delivery = Delivery(
            self.ledger,
            give_up_s=s.give_up_s,
            learn_schemas=self.schemas.catch_up,
            set_aside_all=s.set_aside_all,
            ahead=timedelta(seconds=s.future_s),
        )
        topic = USAGE.in_namespace(s.kafka.namespace)
        group = ledger_group(s.kafka.namespace)
        self.pruner = Pruner(
            s.postgres,
            group=group,
            topic=topic.name,
            partitions=topic.partitions,
            horizon=timedelta(days=s.horizon_days),
        )
        self.membership = Membership(group=group, patience_s=s.stall_s)
        self.watchdog = Watchdog(
            s.kafka,
            topic=topic.name,
            partitions=topic.partitions,
            stall_s=s.stall_s,
            positions=lambda: self.ledger.positions(topic.name),
            assigned=self.assigned,
            holding=lambda: self.delivery.holding,
        )
        await self._settle(topic.name)
        # Not a task of the app: those begin with the first assignment, and a consumer may never get one.
        self.add_future(self._watch())
        if s.mode == "loop":
            self.loop_reader = UsageLoop(
                s,
                topic=topic.name,
                group=group,
                delivery=self.delivery,
                membership=self.membership,
                beacon=self.beacon,
            )
            await self.add_runtime_dependency(self.loop_reader)
        else:
            self.add_future(self._watch_group())
        self.watermark = Watermark(s.kafka, s.postgres, assigned=self.assigned)
        self.add_future(self.watermark.run())  # it never fails either
        self.add_future(self.pruner.run())  # nor does it
        self.collector = Collector(s.kafka, s.postgres, learn_schemas=self.schemas.catch_up)
        self.add_future(self.collector.run())  # nor this

    async def _watch(self) -> None:
        try:
            await self.watchdog.run()
        except Stalled as error:
            log.critical("stalled, ending: %s", error)
            end_for_certain()
            raise

    async def _watch_group(self) -> None:
        try:
            consumer: Any = self.consumer  # a streams.consumer.LedgerConsumer
            await consumer.watch_group(self.membership)
        except Refused as error:
            log.critical("refused, ending: %s", error)
            end_for_certain()
            raise

    def new_ledger(self, pool: Any) -> Ledger:
        """The ledger behind this app."""
        return Ledger(pool, group=ledger_group(self.settings.kafka.namespace))

    async def _settle(self, topic: str) -> None:
        """Wait for both servers, at most as long as a batch would; then refuse, rewind or go on."""
        s = self.settings
        loop = asyncio.get_running_loop()
        ends = loop.time() + s.give_up_s
        while True:
            try:
                self.watchdog.topic_id = await settle_positions(
                    s.kafka,
                    group=ledger_group(s.kafka.namespace),
                    topic=topic,
                    partitions=USAGE.partitions,
                    book=self.ledger,
                    rewind=s.rewind,
                    skip_gone=s.skip_gone,
                )
                return
            except Exception as error:
                if not (isinstance(error, BusUnavailable) or is_outage(error)) or loop.time() > ends:
                    raise
                log.warning("waiting for Postgres and Kafka: %s: %s", type(error).__name__, error)
            await asyncio.sleep(_START_PAUSE_S)


def build(
    settings: StreamsSettings,
    *,
    app_class: type[LedgerApp] = LedgerApp,
    register: Callable[..., object] = register_usage_agent,
) -> LedgerApp:
    """The app with its agent, watchdog and pages. Raises RuntimeError without Faust's compiled iterator.

    The pure-Python iterator acknowledges events it skips after a rebalance, even on a stream without acks.
    """
    if getattr(faust.streams, "_CStreamIterator", None) is None:
        raise RuntimeError("Faust's compiled stream iterator is not loaded (NO_CYTHON set, or a build without it)")
    app = app_class(
        ledger_group(settings.kafka.namespace),
        broker=";".join(f"kafka://{server}" for server in settings.kafka.bootstrap.split(",")),
        datadir=str(home_dir() / "streams"),
        web_bind="127.0.0.1",
        web_host="127.0.0.1",
        web_port=settings.health_port or _free_port(),
        web_tables_enabled=False,
        web_router_enabled=False,
        topic_disable_leader=True,
        topic_allow_declare=False,
        autodiscover=False,
        # Stopping must not wait for the batch in hand: it stays unacknowledged and is read again.
        stream_wait_empty=False,
        broker_commit_interval=0.5,
        # A killed worker's partitions move on once its session ends; a live one rejoins within the rebalance timeout.
        broker_session_timeout=settings.session_s,
        broker_heartbeat_interval=settings.session_s / 5,
        broker_rebalance_timeout=settings.session_s * 0.6,
        broker_request_timeout=30.0,
        consumer_auto_offset_reset="earliest",
        producer_threaded=False,
        table_standby_replicas=0,  # the group then shares partitions out as a plain consumer does, and may have both
        worker_redirect_stdouts=False,
    )
    app.settings = settings

    async def deliver(records: Sequence[RawRecord]) -> list[Stretch]:
        return await app.delivery.deliver(records)

    if settings.mode == "loop":
        app.producer_only = True  # Faust then hosts the process, its pages and tasks, and joins no group itself
    else:
        register(
            app,
            USAGE.in_namespace(settings.kafka.namespace).name,
            deliver,
            batch_records=settings.batch_records,
            batch_wait_s=settings.batch_wait_s,
        )
    _pages(app)
    return app


def _pages(app: LedgerApp) -> None:
    @app.page("/healthz")
    async def healthz(view: Any, request: Any) -> Any:
        d, w = app.delivery, app.watchdog
        status = 503 if w.stalled else 200
        body: dict[str, Any] = d.figures()
        body |= {"lag": w.lag, "holding": d.holding, "stalled": w.stalled, "outbox": app.relay.standing.figures()}
        body |= {"schemas": app.schemas.figures(), "watermark": app.watermark.why}
        body |= {"dedup": app.pruner.figures(), "letters": app.collector.figures(), "refused": app.membership.refused}
        return view.json(body, status=status)

    @app.page("/readyz")
    async def readyz(view: Any, request: Any) -> Any:
        partitions = sorted(app.assigned())
        reason = app.delivery.holding or app.membership.refused
        reason = reason or ("the group is rebalancing" if app.moving else None)
        if reason is None:
            try:
                await app.ledger.reachable(timeout_s=1.0)
            except Exception as error:
                if not is_outage(error):
                    raise
                reason = f"Postgres: {type(error).__name__}: {error}"
        return view.json({"partitions": partitions, "reason": reason}, status=503 if reason else 200)


def _require_free(port: int) -> None:
    """Raises SystemExit, whose message is the last line of the process, when another listens on the port (0: never).

    Faust would find out later, and end with a traceback through the whole of its web server.
    """
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise SystemExit(
            f"Error: INFERLOG_STREAMS_PORT {port} is in use (is a ledger of `inferlog up` running? set another port)"
        ) from error


def _free_port() -> int:
    """A port for the health pages when none is set: several workers on one host then do not collide."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


app = build(streams_settings())
