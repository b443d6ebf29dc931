import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.util.UUID;

/**
 * What the hourly count needs of a UsageRecorded record, read by hand off its framed Avro bytes (version 1, in the order
 * of schemas/avro/usage_recorded.avsc). Fields that it does not need are skipped, which is less than the ledger does.
 */
record Usage(long occurredAtMs, UUID requestId, long requests, long items, long tokens) {
    private static final int FRAME_BYTES = 5;

    static Usage read(byte[] framed) {
        ByteBuffer in = ByteBuffer.wrap(framed, FRAME_BYTES, framed.length - FRAME_BYTES);
        text(in); // event_id
        long occurredAtUs = number(in);
        UUID requestId = UUID.fromString(text(in));
        for (int skipped = 0; skipped < 4; skipped++) {
            skip(in); // customer_id (the record's key as well), model, version, price_id
        }
        long requests = 0, items = 0, tokens = 0;
        for (long entries = number(in); entries != 0; entries = number(in)) {
            if (entries < 0) { // a block that tells its size
                number(in);
                entries = -entries;
            }
            for (; entries > 0; entries--) {
                String meter = text(in);
                long quantity = number(in);
                switch (meter) {
                    case "requests" -> requests = quantity;
                    case "items" -> items = quantity;
                    case "tokens" -> tokens = quantity;
                    default -> throw new IllegalArgumentException("unknown meter " + meter);
                }
            }
        }
        return new Usage(Math.floorDiv(occurredAtUs, 1000), requestId, requests, items, tokens);
    }

    private static long number(ByteBuffer in) {
        long zigzag = 0;
        for (int shift = 0; ; shift += 7) {
            byte part = in.get();
            zigzag |= (long) (part & 0x7f) << shift;
            if (part >= 0) {
                return (zigzag >>> 1) ^ -(zigzag & 1);
            }
        }
    }

    private static String text(ByteBuffer in) {
        byte[] bytes = new byte[(int) number(in)];
        in.get(bytes);
        return new String(bytes, StandardCharsets.UTF_8);
    }

    private static void skip(ByteBuffer in) {
        int size = (int) number(in);
        in.position(in.position() + size);
    }
}
