// The official Node SDK: connect, store, read, count, touch, remove. Argument: host:port.
// Prints "ok" and ends with 0, or throws.
"use strict";

const assert = require("node:assert/strict");
const couchbase = require("couchbase");

async function main(address) {
  const cluster = await couchbase.connect(`couchbase://${address}`, {
    username: "guest",
    password: "guest",
  });
  const collection = cluster.bucket("default").defaultCollection();

  const stored = await collection.upsert("node:1", { name: "one", list: [1, 2, 3] });
  const found = await collection.get("node:1");
  assert.deepEqual(found.content, { name: "one", list: [1, 2, 3] });
  assert.equal(found.cas.toString(), stored.cas.toString());
  assert.ok(stored.token, "a mutation token");

  await assert.rejects(collection.insert("node:1", {}), couchbase.DocumentExistsError);
  await assert.rejects(
    collection.replace("node:1", {}, { cas: "1" }),
    couchbase.CasMismatchError,
  );
  assert.equal((await collection.exists("node:1")).exists, true);
  assert.equal((await collection.exists("node:none")).exists, false);

  const counter = collection.binary();
  assert.equal((await counter.increment("node:count", 5, { initial: 10 })).value, 10);
  assert.equal((await counter.increment("node:count", 5)).value, 15);
  assert.equal((await counter.decrement("node:count", 100)).value, 0);

  await collection.touch("node:1", 60);
  assert.deepEqual((await collection.getAndTouch("node:1", 0)).content.name, "one");
  const looked = await collection.lookupIn("node:1", [
    couchbase.LookupInSpec.get("list[-1]"),
    couchbase.LookupInSpec.exists("none"),
    couchbase.LookupInSpec.count("list"),
  ]);
  assert.deepEqual(looked.content.map((one) => one.value), [3, false, 3]);
  const mutated = await collection.mutateIn("node:1", [
    couchbase.MutateInSpec.upsert("meta.by", "node", { xattr: true, createPath: true }),
    couchbase.MutateInSpec.increment("count", 5),
    couchbase.MutateInSpec.arrayAppend("list", 4),
  ]);
  assert.equal(mutated.content[1].value, 5);
  const attributes = await collection.lookupIn("node:1", [
    couchbase.LookupInSpec.get("meta.by", { xattr: true }),
  ]);
  assert.equal(attributes.content[0].value, "node");
  assert.deepEqual((await collection.get("node:1", { project: ["list"] })).content, {
    list: [1, 2, 3, 4],
  });

  await collection.remove("node:1");
  await assert.rejects(collection.get("node:1"), couchbase.DocumentNotFoundError);

  await collection.upsert("node:lock", { n: 1 });
  const locked = await collection.getAndLock("node:lock", 20);
  assert.deepEqual(locked.content, { n: 1 });
  await assert.rejects(collection.upsert("node:lock", {}, { timeout: 500 }));
  await collection.replace("node:lock", { n: 2 }, { cas: locked.cas });
  const again = await collection.getAndLock("node:lock", 20);
  await collection.unlock("node:lock", again.cas);
  await collection.upsert("node:lock", { n: 3 });

  for (const durabilityLevel of [1, 2, 3]) {
    await collection.upsert("node:durable", { durabilityLevel }, { durabilityLevel });
    await collection.remove("node:durable", { durabilityLevel });
  }

  const many = Array.from({ length: 300 }, (_, number) => `node:many:${number}`);
  await Promise.all(many.map((key, number) => collection.upsert(key, { number })));
  const values = await Promise.all(many.map((key) => collection.get(key)));
  assert.deepEqual(values.map((one) => one.content.number), many.map((_, number) => number));

  const buckets = cluster.buckets();
  assert.equal((await buckets.getBucket("default")).name, "default");
  assert.equal((await buckets.getAllBuckets()).length, 1);
  await assert.rejects(buckets.getBucket("none"), couchbase.BucketNotFoundError);
  await assert.rejects(
    buckets.createBucket({ name: "default", ramQuotaMB: 100 }),
    couchbase.BucketExistsError,
  );
  await assert.rejects(buckets.flushBucket("default"), couchbase.BucketNotFlushableError);

  await cluster.close();
  console.log("ok");
}

main(process.argv[2]).catch((error) => {
  console.error(error);
  process.exit(1);
});
