import java.nio.ByteBuffer;
import org.apache.kafka.common.serialization.Serde;
import org.apache.kafka.common.serialization.Serdes;

/** The sums of one customer's hour. */
record Totals(long requests, long items, long tokens) {
    static final Totals NOTHING = new Totals(0, 0, 0);
    static final Serde<Totals> SERDE = Serdes.serdeFrom((topic, t) -> bytes(t), (topic, b) -> read(b));

    Totals plus(Usage usage) {
        return new Totals(requests + usage.requests(), items + usage.items(), tokens + usage.tokens());
    }

    private static byte[] bytes(Totals t) {
        return t == null ? null : ByteBuffer.allocate(24).putLong(t.requests).putLong(t.items).putLong(t.tokens).array();
    }

    private static Totals read(byte[] bytes) {
        if (bytes == null) {
            return null;
        }
        ByteBuffer in = ByteBuffer.wrap(bytes);
        return new Totals(in.getLong(), in.getLong(), in.getLong());
    }
}
