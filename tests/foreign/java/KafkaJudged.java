// The Kafka connector for `dcpctl conformance consumer`: its source connector with one task, in the
// place that Kafka Connect has, without a broker. What would go to the topic is told as lines. The
// offsets of the records are saved in STATE_DIR after each batch. A topic gets no word of a rollback,
// so there is none here. Arguments are more settings: NAME=VALUE.

import com.couchbase.connect.kafka.CouchbaseSourceConnector;
import com.couchbase.connect.kafka.CouchbaseSourceTask;
import com.fasterxml.jackson.core.type.TypeReference;
import com.fasterxml.jackson.databind.DeserializationFeature;
import com.fasterxml.jackson.databind.ObjectMapper;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.StandardCopyOption;
import java.util.Collection;
import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import org.apache.kafka.connect.connector.ConnectorContext;
import org.apache.kafka.connect.data.Struct;
import org.apache.kafka.connect.source.SourceRecord;
import org.apache.kafka.connect.source.SourceTaskContext;
import org.apache.kafka.connect.storage.OffsetStorageReader;

public class KafkaJudged {
  static final ObjectMapper json =
      new ObjectMapper().enable(DeserializationFeature.USE_LONG_FOR_INTS); // as Connect does
  static final Path STATE = Path.of(System.getenv("STATE_DIR"), "offsets");
  static final Map<String, Map<String, Object>> offsets = new HashMap<>();

  static String name(Map<String, ?> partition) {
    return new TreeMap<>(partition).toString();
  }

  static class Reader implements OffsetStorageReader {
    public <T> Map<String, Object> offset(Map<String, T> partition) {
      return offsets.get(name(partition));
    }

    public <T> Map<Map<String, T>, Map<String, Object>> offsets(Collection<Map<String, T>> some) {
      Map<Map<String, T>, Map<String, Object>> found = new HashMap<>();
      for (Map<String, T> each : some) found.put(each, offset(each));
      return found;
    }
  }

  static void tell(SourceRecord record) throws Exception {
    Struct value = (Struct) record.value();
    boolean isSet = value.getString("event").equals("mutation");
    Map<String, Object> event = new LinkedHashMap<>();
    event.put("op", isSet ? "set" : "delete");
    event.put("vb", Integer.parseInt((String) record.sourcePartition().get("partition")));
    event.put("seqno", ((Number) record.sourceOffset().get("bySeqno")).longValue());
    event.put("key", record.key());
    if (isSet) event.put("value", new String(value.getBytes("content"), StandardCharsets.UTF_8));
    System.out.println(json.writeValueAsString(event));
  }

  static void save() throws Exception {
    Path written = STATE.resolveSibling("offsets.new");
    Files.write(written, json.writeValueAsBytes(offsets));
    Files.move(written, STATE, StandardCopyOption.ATOMIC_MOVE, StandardCopyOption.REPLACE_EXISTING);
  }

  public static void main(String[] arguments) throws Exception {
    if (Files.exists(STATE)) {
      offsets.putAll(json.readValue(Files.readAllBytes(STATE), new TypeReference<>() {}));
    }
    Map<String, String> settings = new HashMap<>();
    settings.put("name", "judged");
    settings.put("couchbase.topic", "judged");
    settings.put("couchbase.seed.nodes", System.getenv("HOST") + ":" + System.getenv("PORT"));
    settings.put("couchbase.bucket", System.getenv("BUCKET"));
    settings.put("couchbase.username", System.getenv("USERNAME"));
    settings.put("couchbase.password", System.getenv("PASSWORD"));
    settings.put("couchbase.collections", "_default._default");
    settings.put("couchbase.source.handler",
        "com.couchbase.connect.kafka.handler.source.DefaultSchemaSourceHandler");
    for (String each : arguments) settings.put(each.split("=")[0], each.split("=")[1]);

    CouchbaseSourceConnector connector = new CouchbaseSourceConnector();
    connector.initialize(new ConnectorContext() {
      public void requestTaskReconfiguration() {}

      public void raiseError(Exception error) {
        error.printStackTrace();
        System.exit(1);
      }
    });
    connector.start(settings);
    Map<String, String> config = connector.taskConfigs(1).get(0);
    CouchbaseSourceTask task = new CouchbaseSourceTask();
    task.initialize(new SourceTaskContext() {
      public Map<String, String> configs() {
        return config;
      }

      public OffsetStorageReader offsetStorageReader() {
        return new Reader();
      }
    });
    task.start(config);
    while (true) {
      List<SourceRecord> records;
      try {
        records = task.poll();
      } catch (Exception error) { // Connect fails the task then, and somebody has to restart it
        error.printStackTrace();
        System.exit(1);
        return;
      }
      if (records == null) continue;
      for (SourceRecord record : records) {
        tell(record);
        offsets.put(name(record.sourcePartition()), new HashMap<>(record.sourceOffset()));
        task.commitRecord(record, null);
      }
      System.out.flush();
      save();
      task.commit();
    }
  }
}
