// The official Node SDK writes documents and counts, until its input ends.
// Arguments: host:port of one node, writers, documents of each. Then it prints what became of its
// writes as JSON, in the form of tests/cluster_processes/test_foreign_clients.py.
"use strict";

const couchbase = require("couchbase");

const TIMEOUT_MS = 8000;
const COUNTERS = 4;
const MAY_HAVE_HAPPENED = [
  couchbase.AmbiguousTimeoutError,
  couchbase.RequestCanceledError,
  couchbase.DurabilityAmbiguousError,
];

const told = {
  answered: {}, tried: {}, not_done: [], ambiguous: [], unexpected: [], counted: {}, maybe_counted: {},
  durable: 0, plain: 0,
};
let isOver = false;

// What became of an operation: its result, "ambiguous" or "not done".
async function outcome(operation, key, turn) {
  try {
    return await operation();
  } catch (error) {
    if (MAY_HAVE_HAPPENED.some((kind) => error instanceof kind)) {
      told.ambiguous.push([key, turn]);
      return "ambiguous";
    }
    if (error instanceof couchbase.UnambiguousTimeoutError) {
      told.not_done.push([key, turn]); // the SDK kept it, and did not send it
    } else {
      told.unexpected.push(`${key}: ${error}`);
    }
    return "not done";
  }
}

async function write(collection, number, documents) {
  const kind = number % 2 ? "durable" : "plain";
  const durable = number % 2 ? { durabilityLevel: couchbase.DurabilityLevel.Majority } : {};
  for (let turn = 0; !isOver; turn += 1) {
    const key = `node-${number}-${turn % documents}`;
    told.tried[key] = turn;
    const stored = await outcome(() => collection.upsert(key, { turn }, durable), key, turn);
    if (typeof stored === "object") {
      told.answered[key] = turn;
      told[kind] += 1;
    }
    const counter = `node-count-${number}-${turn % COUNTERS}`;
    const count = () => collection.binary().increment(counter, 1, { initial: 1, ...durable });
    const counted = await outcome(count, counter, turn);
    if (typeof counted === "object") {
      countAnswered(counter, counted.value);
      told[kind] += 1;
    } else if (counted === "ambiguous") {
      told.maybe_counted[counter] = (told.maybe_counted[counter] || 0) + 1;
    }
  }
}

function countAnswered(counter, value) {
  const count = (told.counted[counter] || 0) + 1;
  told.counted[counter] = count;
  if (value < count || value > count + (told.maybe_counted[counter] || 0)) {
    told.unexpected.push(`${counter}: ${value} after ${count} answers`);
  }
}

// A copy learns that a change is committed with its master's next message.
async function readFromReplicas(collection) {
  const key = Object.keys(told.answered)[0];
  const giveUpMs = Date.now() + TIMEOUT_MS;
  for (;;) {
    const all = (await collection.getAllReplicas(key)).map((copy) => copy.content);
    const any = (await collection.getAnyReplica(key)).content;
    const turns = new Set([any, ...all].map((copy) => copy.turn));
    if ((all.length === 3 && turns.size === 1) || Date.now() > giveUpMs) {
      return [key, all, any];
    }
  }
}

async function main(address, writers, documents) {
  const cluster = await couchbase.connect(`couchbase://${address}`, {
    username: "guest",
    password: "guest",
    timeouts: { kvTimeout: TIMEOUT_MS, kvDurableTimeout: TIMEOUT_MS },
  });
  const collection = cluster.bucket("default").defaultCollection();
  process.stdin.on("end", () => { isOver = true; }).resume();
  const numbers = Array.from({ length: writers }, (_, number) => number);
  await Promise.all(numbers.map((number) => write(collection, number, documents)));
  told.read_from_replicas = await readFromReplicas(collection);
  await cluster.close();
  console.log(JSON.stringify(told));
}

const [address, writers, documents] = process.argv.slice(2);
main(address, Number(writers), Number(documents)).catch((error) => {
  console.error(error);
  process.exit(1);
});
