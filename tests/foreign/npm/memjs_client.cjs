// memjs, a binary memcached client that logs in with SASL PLAIN. Argument: host:port.
// Prints "ok" and ends with 0, or throws.
"use strict";

const assert = require("node:assert/strict");
const memjs = require("memjs");

async function main(address) {
  const client = memjs.Client.create(`guest:guest@${address}`, { retries: 1, timeout: 5 });

  assert.equal(await client.set("memjs:1", "one", { expires: 60 }), true);
  const { value, flags } = await client.get("memjs:1");
  assert.equal(value.toString(), "one");
  assert.ok(flags);
  assert.equal((await client.get("memjs:none")).value, null);

  assert.equal(await client.add("memjs:1", "two", {}), false);
  assert.equal(await client.replace("memjs:1", "three", {}), true);
  assert.equal(await client.append("memjs:1", "!"), true);
  // Its prepend sends the opcode of append (1.3.2), so it is not asked for one.
  assert.equal((await client.get("memjs:1")).value.toString(), "three!");

  assert.equal((await client.increment("memjs:n", 4, { initial: 10 })).value, 10);
  assert.equal((await client.increment("memjs:n", 4, {})).value, 14);
  assert.equal((await client.decrement("memjs:n", 5, {})).value, 9);
  assert.equal(await client.touch("memjs:1", 100), true);
  assert.equal(await client.delete("memjs:1"), true);
  assert.equal(await client.delete("memjs:1"), false);

  const binary = Buffer.from(Array.from({ length: 256 }, (_, byte) => byte));
  await client.set("memjs:bytes", binary, {});
  assert.deepEqual((await client.get("memjs:bytes")).value, binary);

  client.close();
  console.log("ok");
}

main(process.argv[2]).catch((error) => {
  console.error(error);
  process.exit(1);
});
