import java.nio.ByteBuffer;
import java.util.UUID;
import java.util.concurrent.atomic.LongAdder;
import org.apache.kafka.common.serialization.Serdes;
import org.apache.kafka.common.utils.Bytes;
import org.apache.kafka.streams.processor.api.FixedKeyProcessor;
import org.apache.kafka.streams.processor.api.FixedKeyProcessorContext;
import org.apache.kafka.streams.processor.api.FixedKeyRecord;
import org.apache.kafka.streams.state.KeyValueStore;
import org.apache.kafka.streams.state.StoreBuilder;
import org.apache.kafka.streams.state.Stores;

/**
 * Counts what was read and, when it has a store, lets only the first record of a request through. The store (RocksDB,
 * with its changelog) never forgets: cheaper than one with a horizon, which would be a windowed store.
 */
final class FirstOnly implements FixedKeyProcessor<String, Usage, Usage> {
    static final String STORE = "seen";

    private final LongAdder read;
    private final boolean remembers;
    private FixedKeyProcessorContext<String, Usage> context;
    private KeyValueStore<Bytes, Long> seen;

    FirstOnly(LongAdder read, boolean remembers) {
        this.read = read;
        this.remembers = remembers;
    }

    static StoreBuilder<KeyValueStore<Bytes, Long>> store() {
        return Stores.keyValueStoreBuilder(Stores.persistentKeyValueStore(STORE), Serdes.Bytes(), Serdes.Long());
    }

    @Override
    public void init(FixedKeyProcessorContext<String, Usage> context) {
        this.context = context;
        this.seen = remembers ? context.getStateStore(STORE) : null;
    }

    @Override
    public void process(FixedKeyRecord<String, Usage> record) {
        boolean first = !remembers
                || seen.putIfAbsent(key(record.value().requestId()), record.value().occurredAtMs()) == null;
        if (first) {
            context.forward(record);
        }
        read.increment();
    }

    private static Bytes key(UUID id) {
        long high = id.getMostSignificantBits(), low = id.getLeastSignificantBits();
        return Bytes.wrap(ByteBuffer.allocate(16).putLong(high).putLong(low).array());
    }
}
