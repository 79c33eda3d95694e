// java-dcp-client for `dcpctl conformance consumer`: it finds HOST, PORT and STATE_DIR in its
// environment, goes on from the offsets that it saved, and tells each event as a line of JSON.

import com.couchbase.client.dcp.Client;
import com.couchbase.client.dcp.StreamFrom;
import com.couchbase.client.dcp.StreamTo;
import com.couchbase.client.dcp.highlevel.*;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.StandardCopyOption;
import java.util.HashMap;
import java.util.Map;
import java.util.TreeMap;

public class DcpJudged {
  static final Path STATE = Path.of(System.getenv("STATE_DIR"), "offsets");
  static final Map<Integer, StreamOffset> offsets = new TreeMap<>();

  static String quoted(String text) {
    StringBuilder json = new StringBuilder("\"");
    for (char each : text.toCharArray()) {
      if (each == '"' || each == '\\') json.append('\\').append(each);
      else if (each < ' ') json.append(String.format("\\u%04x", (int) each));
      else json.append(each);
    }
    return json.append('"').toString();
  }

  static synchronized void tell(String op, int vb, long seqno, String more) {
    System.out.println(
        "{\"op\":\"" + op + "\",\"vb\":" + vb + ",\"seqno\":" + Long.toUnsignedString(seqno) + more + "}");
    System.out.flush();
  }

  static synchronized void save(int vb, StreamOffset offset) throws Exception {
    offsets.put(vb, offset);
    StringBuilder lines = new StringBuilder();
    for (Map.Entry<Integer, StreamOffset> each : offsets.entrySet()) {
      StreamOffset place = each.getValue();
      lines.append(String.format("%d %d %d %d %d %d%n", each.getKey(), place.getVbuuid(),
          place.getSeqno(), place.getSnapshot().getStartSeqno(),
          place.getSnapshot().getEndSeqno(), place.getCollectionsManifestUid()));
    }
    Path written = STATE.resolveSibling("offsets.new");
    Files.writeString(written, lines.toString());
    Files.move(written, STATE, StandardCopyOption.ATOMIC_MOVE, StandardCopyOption.REPLACE_EXISTING);
  }

  static class Listener implements DatabaseChangeListener {
    void take(DocumentChange change, String op, String value) {
      String collection = change.getCollection().scope().name() + "." + change.getCollection().name();
      tell(op, change.getVbucket(), change.getOffset().getSeqno(),
          ",\"key\":" + quoted(change.getKey()) + value + ",\"collection\":" + quoted(collection));
      try {
        save(change.getVbucket(), change.getOffset());
      } catch (Exception error) {
        throw new RuntimeException(error);
      }
    }

    public void onMutation(Mutation mutation) {
      String value = new String(mutation.getContent(), StandardCharsets.UTF_8);
      take(mutation, "set", ",\"value\":" + quoted(value));
    }

    public void onDeletion(Deletion deletion) {
      take(deletion, "delete", "");
    }

    public void onRollback(Rollback rollback) {
      tell("rollback", rollback.getVbucket(), rollback.getSeqno(), "");
      rollback.resume();
    }

    public void onFailure(StreamFailure failure) {
      System.err.println("vb " + failure.getVbucket() + ": " + failure.getCause());
    }
  }

  public static void main(String[] arguments) throws Exception {
    Client client =
        Client.builder()
            .seedNodes(System.getenv("HOST") + ":" + System.getenv("PORT"))
            .credentials(System.getenv("USERNAME"), System.getenv("PASSWORD"))
            .bucket(System.getenv("BUCKET"))
            .collectionsAware(true)
            .flowControl(16 * 1024 * 1024)
            .build();
    client.listener(new Listener(), FlowControlMode.AUTOMATIC);
    client.connect().block();
    Map<Integer, StreamOffset> from = new HashMap<>();
    for (int vb = 0; vb < client.numPartitions(); vb++) from.put(vb, StreamOffset.ZERO);
    if (Files.exists(STATE)) {
      for (String line : Files.readAllLines(STATE)) {
        String[] words = line.split(" ");
        long[] numbers = new long[words.length];
        for (int at = 0; at < words.length; at++) numbers[at] = Long.parseLong(words[at]);
        StreamOffset offset = new StreamOffset(numbers[1], numbers[2],
            new SnapshotMarker(numbers[3], numbers[4]), numbers[5]);
        from.put((int) numbers[0], offset);
        offsets.put((int) numbers[0], offset);
      }
    }
    client.initializeState(StreamFrom.BEGINNING, StreamTo.INFINITY).block();
    client.resumeStreaming(from).block();
    Thread.currentThread().join();
  }
}
