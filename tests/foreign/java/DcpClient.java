// java-dcp-client: streams everything until now and prints "KEY LENGTH" of each document, followed by
// " NAME=VALUE" of each XATTR.
// Arguments: host:port, compression mode, then optionally a collection id (hexadecimal) and the
// value of the control enable_out_of_order_snapshots.

import com.couchbase.client.dcp.Client;
import com.couchbase.client.dcp.StreamFrom;
import com.couchbase.client.dcp.StreamTo;
import com.couchbase.client.dcp.config.CompressionMode;
import com.couchbase.client.dcp.highlevel.*;
import java.util.TreeMap;
import java.util.concurrent.ConcurrentSkipListMap;
import java.util.concurrent.TimeUnit;

public class DcpClient {
  public static void main(String[] arguments) throws Exception {
    Client.Builder builder =
        Client.builder()
            .seedNodes(arguments[0])
            .credentials("guest", "guest")
            .bucket("default")
            .collectionsAware(true)
            .flowControl(64 * 1024)
            .xattrs(true)
            .compression(CompressionMode.valueOf(arguments[1]));
    if (arguments.length > 2) {
      builder.collectionIds(Long.parseLong(arguments[2], 16));
      builder.controlParam("enable_out_of_order_snapshots", arguments[3]);
    }
    ConcurrentSkipListMap<String, String> seen = new ConcurrentSkipListMap<>();
    Client client = builder.build();
    client.listener(
        new DatabaseChangeListener() {
          public synchronized void onMutation(Mutation mutation) {
            StringBuilder line = new StringBuilder(String.valueOf(mutation.getContent().length));
            new TreeMap<>(mutation.getXattrs())
                .forEach((name, value) -> line.append(" " + name + "=" + value));
            seen.put(mutation.getKey(), line.toString());
          }

          public void onDeletion(Deletion deletion) {}

          public void onFailure(StreamFailure failure) {
            failure.getCause().printStackTrace();
            System.exit(1);
          }
        },
        FlowControlMode.AUTOMATIC);
    client.connect().block();
    client.initializeState(StreamFrom.BEGINNING, StreamTo.NOW).block();
    client.startStreaming().block();
    while (!client.sessionState().isAtEnd()) {
      TimeUnit.MILLISECONDS.sleep(50);
    }
    int told; // listeners run in a thread of their own, behind the state of the session
    do {
      told = seen.size();
      TimeUnit.MILLISECONDS.sleep(1000);
    } while (seen.size() != told);
    client.disconnect().block();
    seen.forEach((key, length) -> System.out.println(key + " " + length));
    System.exit(0);
  }
}
