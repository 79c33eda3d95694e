// java-dcp-client follows a cluster with rollback mitigation on, until its input ends.
// Argument: host:port of one node. Each line of input asks for what it has seen, and is answered with
// "KEY<tab>VALUE" of each document and a line ".". A failure of a stream, and a rollback that takes
// back a change which was delivered, are lines "failed ..." in front of them.

import com.couchbase.client.dcp.Client;
import com.couchbase.client.dcp.StreamFrom;
import com.couchbase.client.dcp.StreamTo;
import com.couchbase.client.dcp.highlevel.*;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.util.Map;
import java.util.Queue;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.ConcurrentLinkedQueue;
import java.util.concurrent.TimeUnit;

public class DcpFollower {
  static final Map<String, String> documents = new ConcurrentHashMap<>();
  static final Map<Integer, Long> delivered = new ConcurrentHashMap<>();
  static final Queue<String> failures = new ConcurrentLinkedQueue<>();

  static class Listener implements DatabaseChangeListener {
    public void onMutation(Mutation mutation) {
      String value = new String(mutation.getContent(), StandardCharsets.UTF_8);
      documents.put(mutation.getKey(), value);
      delivered.put(mutation.getVbucket(), mutation.getOffset().getSeqno());
    }

    public void onDeletion(Deletion deletion) {
      documents.remove(deletion.getKey());
      delivered.put(deletion.getVbucket(), deletion.getOffset().getSeqno());
    }

    public void onRollback(Rollback rollback) {
      long seqno = delivered.getOrDefault(rollback.getVbucket(), 0L);
      if (seqno > rollback.getSeqno()) {
        failures.add("vb " + rollback.getVbucket() + ": " + seqno + " was delivered, and the"
            + " rollback is to " + rollback.getSeqno());
      }
      rollback.resume();
    }

    public void onFailure(StreamFailure failure) {
      failures.add("vb " + failure.getVbucket() + ": " + failure.getCause());
    }
  }

  public static void main(String[] arguments) throws Exception {
    Client client =
        Client.builder()
            .seedNodes(arguments[0])
            .credentials("guest", "guest")
            .bucket("default")
            .collectionsAware(true)
            .flowControl(1024 * 1024)
            .mitigateRollbacks(100, TimeUnit.MILLISECONDS)
            .build();
    client.listener(new Listener(), FlowControlMode.AUTOMATIC);
    client.connect().block();
    client.initializeState(StreamFrom.BEGINNING, StreamTo.INFINITY).block();
    client.startStreaming().block();
    BufferedReader input = new BufferedReader(new InputStreamReader(System.in));
    while (input.readLine() != null) {
      StringBuilder answer = new StringBuilder();
      failures.forEach(failure -> answer.append("failed " + failure.replace('\n', ' ') + "\n"));
      documents.forEach((key, value) -> answer.append(key + "\t" + value + "\n"));
      System.out.println(answer + ".");
    }
    client.disconnect().block();
    System.exit(0);
  }
}
