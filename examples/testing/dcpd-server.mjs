// A dcpd server for each test, in Node.js. Copy this file; it needs nothing but the command dcpd.
//
//   const server = await DcpdServer.start();
//   myConsumer.connect(server.address);          // HOST:PORT of the key-value port
//   await server.failover(92, 2);                // the newest two changes of partition 92 are lost
//   await server.close();

import { spawn } from "node:child_process";
import { once } from "node:events";
import { mkdtemp, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { createInterface } from "node:readline";

const GUEST = `Basic ${Buffer.from("guest:guest").toString("base64")}`;

export class DcpdServer {
  /** Start a server on free ports and a new folder. `options` are those of dcpd. */
  static async start(...options) {
    const server = new DcpdServer();
    server.folder = await mkdtemp(join(tmpdir(), "dcpd-test-"));
    server.options = options;
    server.port = server.adminPort = "0";
    await server.run();
    return server;
  }

  get address() {
    return `127.0.0.1:${this.port}`;
  }

  get adminUrl() {
    return `http://127.0.0.1:${this.adminPort}`;
  }

  /** Start the process again after kill(), with the same folder and ports. */
  async run() {
    const ports = ["--port", this.port, "--admin-port", this.adminPort];
    const data = ["--data", join(this.folder, "data")];
    this.process = spawn(process.env.DCPD ?? "dcpd", [...ports, ...data, ...this.options], {
      stdio: ["ignore", "pipe", "inherit"],
    });
    await once(this.process, "spawn");
    for await (const line of createInterface({ input: this.process.stdout })) {
      this.port = line.match(/^ +key-value +.*:(\d+)/)?.[1] ?? this.port;
      this.adminPort = line.match(/^ +admin +.*:(\d+)/)?.[1] ?? this.adminPort;
      if (/^ +try /.test(line)) return; // the last line: it is ready
    }
    throw new Error("dcpd did not start: see its output");
  }

  /** Kill it (SIGKILL). What was answered is on disk. */
  async kill(signal = "SIGKILL") {
    if (this.process.exitCode !== null || this.process.signalCode !== null) return;
    this.process.kill(signal);
    await once(this.process, "exit");
  }

  /** Stop it, and delete its folder. */
  async close() {
    await this.kill("SIGTERM");
    await rm(this.folder, { recursive: true, force: true });
  }

  /** Undo the changes of a partition above a seqno. Its streams end with reason 6. */
  branch(vb, at) {
    return this.post(`vbuckets/${vb}/branch`, { at });
  }

  /** Fail over to a copy that was `lose` changes behind. Streams end with reason 2. */
  failover(vb, lose = 0) {
    return this.post(`vbuckets/${vb}/failover`, { lose });
  }

  /** Add a rule, such as {opcode: "GET", delay_ms: 50}. */
  fault(rule) {
    return this.post("faults", rule);
  }

  /** POST to the HTTP API; return the answer. */
  async post(path, body) {
    const answer = await fetch(`${this.adminUrl}/api/v1/${path}`, {
      method: "POST",
      headers: { authorization: GUEST, "content-type": "application/json" },
      body: JSON.stringify(body),
    });
    if (!answer.ok) throw new Error(`${path}: ${answer.status} ${await answer.text()}`);
    return answer.json();
  }
}
