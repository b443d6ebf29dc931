import com.sun.management.OperatingSystemMXBean;
import java.io.PrintStream;
import java.lang.management.ManagementFactory;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.Properties;
import java.util.concurrent.atomic.AtomicReference;
import java.util.concurrent.atomic.LongAdder;
import org.apache.kafka.common.serialization.Serdes;
import org.apache.kafka.common.utils.Bytes;
import org.apache.kafka.streams.KafkaStreams;
import org.apache.kafka.streams.StoreQueryParameters;
import org.apache.kafka.streams.StreamsBuilder;
import org.apache.kafka.streams.StreamsConfig;
import org.apache.kafka.streams.errors.StreamsUncaughtExceptionHandler.StreamThreadExceptionResponse;
import org.apache.kafka.streams.kstream.Consumed;
import org.apache.kafka.streams.kstream.Grouped;
import org.apache.kafka.streams.kstream.KStream;
import org.apache.kafka.streams.kstream.Materialized;
import org.apache.kafka.streams.kstream.TimeWindows;
import org.apache.kafka.streams.state.QueryableStoreTypes;
import org.apache.kafka.streams.state.WindowStore;

/**
 * Usage per customer and hour, by Kafka Streams: the outside reference of `make bench-ledger`.
 *
 * <p>Arguments: bootstrap, topic, folder, then variants as name:guarantee:dedup|plain:threads:records. They run one
 * after the other in this virtual machine, so that only the first pays for its warming up. Prints lines of
 * "AT name nanoseconds records cpuNanoseconds" and "DONE name"; the sums of a variant are in folder/name.tsv.
 */
public final class HourlyCount {
    private static final Duration HOUR = Duration.ofHours(1);
    // Longer than all event time of the topic: nothing is dropped for coming late.
    private static final Duration GRACE = Duration.ofHours(24);
    private static final long GIVE_UP_NS = Duration.ofMinutes(5).toNanos();
    private static final int PAUSE_MS = 50;

    private final String bootstrap;
    private final String topic;
    private final Path folder;

    private HourlyCount(String bootstrap, String topic, Path folder) {
        this.bootstrap = bootstrap;
        this.topic = topic;
        this.folder = folder;
    }

    public static void main(String[] arguments) throws Exception {
        HourlyCount count = new HourlyCount(arguments[0], arguments[1], Path.of(arguments[2]));
        for (int at = 3; at < arguments.length; at++) {
            String[] v = arguments[at].split(":");
            count.run(v[0], v[1], v[2].equals("dedup"), Integer.parseInt(v[3]), Long.parseLong(v[4]));
        }
    }

    private void run(String name, String guarantee, boolean dedup, int threads, long records) throws Exception {
        LongAdder read = new LongAdder();
        AtomicReference<Throwable> failure = new AtomicReference<>();
        try (KafkaStreams streams = new KafkaStreams(
                topology(read, dedup).build(), properties(name, guarantee, threads))) {
            streams.setUncaughtExceptionHandler(error -> {
                failure.set(error);
                return StreamThreadExceptionResponse.SHUTDOWN_CLIENT;
            });
            streams.start();
            long began = System.nanoTime();
            while (read.sum() < records) {
                tell(name, read.sum());
                Thread.sleep(PAUSE_MS);
                if (failure.get() != null) {
                    throw new IllegalStateException(name + " failed", failure.get());
                }
                if (System.nanoTime() - began > GIVE_UP_NS) {
                    throw new IllegalStateException(name + ": " + read.sum() + " of " + records + " records read");
                }
            }
            tell(name, read.sum());
            write(streams, folder.resolve(name + ".tsv"));
        }
        System.out.println("DONE " + name);
    }

    private StreamsBuilder topology(LongAdder read, boolean dedup) {
        StreamsBuilder builder = new StreamsBuilder();
        KStream<String, Usage> usage = builder.stream(
                topic,
                Consumed.with(
                                Serdes.String(),
                                Serdes.serdeFrom((t, u) -> null, (t, bytes) -> bytes == null ? null : Usage.read(bytes)))
                        .withTimestampExtractor((record, before) -> ((Usage) record.value()).occurredAtMs()));
        if (dedup) {
            builder.addStateStore(FirstOnly.store());
            usage = usage.processValues(() -> new FirstOnly(read, true), FirstOnly.STORE);
        } else {
            usage = usage.processValues(() -> new FirstOnly(read, false));
        }
        usage.groupByKey(Grouped.keySerde(Serdes.String()))
                .windowedBy(TimeWindows.ofSizeAndGrace(HOUR, GRACE))
                .aggregate(
                        () -> Totals.NOTHING,
                        (customer, u, totals) -> totals.plus(u),
                        Materialized.<String, Totals, WindowStore<Bytes, byte[]>>as("hourly")
                                .withKeySerde(Serdes.String())
                                .withValueSerde(Totals.SERDE));
        return builder;
    }

    /** Defaults but for what the variant is about: commits every 30 s, with exactly_once_v2 every 100 ms. */
    private Properties properties(String name, String guarantee, int threads) {
        Properties p = new Properties();
        p.put(StreamsConfig.APPLICATION_ID_CONFIG, "bench-" + name);
        p.put(StreamsConfig.BOOTSTRAP_SERVERS_CONFIG, bootstrap);
        p.put(StreamsConfig.STATE_DIR_CONFIG, folder.resolve("state").toString());
        p.put(StreamsConfig.PROCESSING_GUARANTEE_CONFIG, guarantee);
        p.put(StreamsConfig.NUM_STREAM_THREADS_CONFIG, threads);
        return p;
    }

    private static void tell(String name, long records) {
        long cpu = ((OperatingSystemMXBean) ManagementFactory.getOperatingSystemMXBean()).getProcessCpuTime();
        System.out.println("AT " + name + " " + System.nanoTime() + " " + records + " " + cpu);
        System.out.flush();
    }

    private static void write(KafkaStreams streams, Path file) throws Exception {
        var store = streams.store(StoreQueryParameters.fromNameAndType(
                "hourly", QueryableStoreTypes.<String, Totals>windowStore()));
        try (PrintStream out = new PrintStream(Files.newOutputStream(file)); var rows = store.all()) {
            while (rows.hasNext()) {
                var row = rows.next();
                Totals t = row.value;
                out.printf("%s\t%d\t%d\t%d\t%d%n", row.key.key(), row.key.window().start(), t.requests(), t.items(),
                        t.tokens());
            }
        }
    }
}
