// The official Java SDK: documents, sub-documents, locks, durability, replicas, buckets. Argument:
// host:port.
// Prints "ok" and ends with 0, or throws.

import com.couchbase.client.core.error.*;
import com.couchbase.client.core.error.subdoc.PathExistsException;
import com.couchbase.client.core.msg.kv.DurabilityLevel;
import com.couchbase.client.core.service.ServiceType;
import com.couchbase.client.java.Cluster;
import com.couchbase.client.java.ClusterOptions;
import com.couchbase.client.java.Collection;
import com.couchbase.client.java.diagnostics.WaitUntilReadyOptions;
import com.couchbase.client.java.json.JsonArray;
import com.couchbase.client.java.json.JsonObject;
import com.couchbase.client.java.kv.*;
import com.couchbase.client.java.manager.bucket.*;
import java.time.Duration;
import java.util.List;

public class CouchbaseClient {
  interface Call {
    void run();
  }

  static void check(boolean holds, String what) {
    if (!holds) throw new AssertionError(what);
  }

  static void fails(Class<? extends Throwable> kind, Call call) {
    try {
      call.run();
    } catch (Throwable error) {
      check(kind.isInstance(error), "expected " + kind + ", not " + error);
      return;
    }
    throw new AssertionError("expected " + kind);
  }

  static JsonObject number(int n) {
    return JsonObject.create().put("n", n);
  }

  static void documents(Collection collection) {
    collection.upsert("java:1", number(1));
    check(collection.get("java:1").contentAsObject().getInt("n") == 1, "the value");
    String text = "again and ".repeat(5000); // compressed on the wire
    collection.upsert("java:large", JsonObject.create().put("text", text));
    check(collection.get("java:large").contentAsObject().getString("text").equals(text), "large");
    check(!collection.getAnyReplica("java:1").isReplica(), "the only copy");
    check(collection.getAllReplicas("java:1").count() == 1, "one copy");
  }

  static void subDocuments(Collection collection) {
    JsonObject start = number(1).put("list", JsonArray.from(1, 2)).put("name", "x".repeat(2000));
    collection.upsert("java:s", start); // compressed on the wire
    collection.mutateIn(
        "java:s",
        List.of(
            MutateInSpec.upsert("note", "by java").xattr(),
            MutateInSpec.upsert("cas", MutateInMacro.CAS).xattr(),
            MutateInSpec.increment("n", 4),
            MutateInSpec.arrayAppend("list", List.of(3)),
            MutateInSpec.upsert("deep.er", true).createPath()));
    LookupInResult found =
        collection.lookupIn(
            "java:s",
            List.of(
                LookupInSpec.get("note").xattr(),
                LookupInSpec.get("$document.exptime").xattr(),
                LookupInSpec.get("n"),
                LookupInSpec.count("list"),
                LookupInSpec.exists("none"),
                LookupInSpec.get("deep.er")));
    check(found.contentAs(0, String.class).equals("by java"), "an XATTR");
    check(found.contentAs(1, Integer.class) == 0, "a virtual XATTR");
    check(found.contentAs(2, Integer.class) == 5, "the counter");
    check(found.contentAs(3, Integer.class) == 3 && !found.exists(4), "the list");
    check(found.contentAs(5, Boolean.class), "a path that was made");
    fails(
        PathExistsException.class,
        () -> collection.mutateIn("java:s", List.of(MutateInSpec.insert("n", 1))));
    fails(
        CasMismatchException.class,
        () ->
            collection.mutateIn(
                "java:s",
                List.of(MutateInSpec.upsert("n", 1)),
                MutateInOptions.mutateInOptions().cas(17)));
    collection.mutateIn(
        "java:s",
        List.of(MutateInSpec.upsert("n", 6)),
        MutateInOptions.mutateInOptions()
            .expiry(Duration.ofHours(1))
            .durability(DurabilityLevel.MAJORITY));
    GetOptions some = GetOptions.getOptions().project("n", "deep.er").withExpiry(true);
    GetResult projected = collection.get("java:s", some);
    check(projected.contentAsObject().getInt("n") == 6, "a projection");
    check(projected.expiryTime().isPresent(), "the expiry");
  }

  static void locks(Collection collection) {
    Duration lockTime = Duration.ofSeconds(20);
    UpsertOptions soon = UpsertOptions.upsertOptions().timeout(Duration.ofMillis(500));
    long cas = collection.getAndLock("java:1", lockTime).cas();
    fails(TimeoutException.class, () -> collection.upsert("java:1", number(2), soon));
    fails(CouchbaseException.class, () -> collection.unlock("java:1", 12345L));
    fails(
        TimeoutException.class,
        () ->
            collection.mutateIn(
                "java:1",
                List.of(MutateInSpec.upsert("n", 2)),
                MutateInOptions.mutateInOptions().timeout(Duration.ofMillis(500))));
    collection.unlock("java:1", cas);
    fails(DocumentNotLockedException.class, () -> collection.unlock("java:1", cas));
    long again = collection.getAndLock("java:1", lockTime).cas();
    collection.replace("java:1", number(3), ReplaceOptions.replaceOptions().cas(again));
    collection.upsert("java:1", number(4), soon);
  }

  static void durability(Collection collection) {
    for (DurabilityLevel level : DurabilityLevel.values()) {
      collection.upsert("java:d", number(1), UpsertOptions.upsertOptions().durability(level));
      collection.remove("java:d", RemoveOptions.removeOptions().durability(level));
    }
    UpsertOptions observed =
        UpsertOptions.upsertOptions().durability(PersistTo.ACTIVE, ReplicateTo.NONE);
    collection.upsert("java:observed", number(1), observed);
  }

  static void buckets(BucketManager buckets) {
    BucketSettings settings = buckets.getBucket("default");
    check(settings.numReplicas() == 0 && !settings.flushEnabled(), "settings");
    check(buckets.getAllBuckets().size() == 1, "one bucket");
    fails(BucketNotFoundException.class, () -> buckets.getBucket("none"));
    fails(
        BucketExistsException.class, () -> buckets.createBucket(BucketSettings.create("default")));
    fails(CouchbaseException.class, () -> buckets.createBucket(BucketSettings.create("other")));
    fails(BucketNotFoundException.class, () -> buckets.dropBucket("none"));
    fails(CouchbaseException.class, () -> buckets.dropBucket("default"));
    fails(BucketNotFlushableException.class, () -> buckets.flushBucket("default"));
  }

  public static void main(String[] arguments) {
    Cluster cluster =
        Cluster.connect(
            "couchbase://" + arguments[0], ClusterOptions.clusterOptions("guest", "guest"));
    cluster.waitUntilReady(
        Duration.ofSeconds(20),
        WaitUntilReadyOptions.waitUntilReadyOptions().serviceTypes(ServiceType.KV));
    Collection collection = cluster.bucket("default").defaultCollection();
    documents(collection);
    subDocuments(collection);
    locks(collection);
    durability(collection);
    buckets(cluster.buckets());
    check(cluster.bucket("default").collections().getAllScopes().size() >= 1, "scopes");
    cluster.disconnect();
    System.out.println("ok");
    System.exit(0);
  }
}
