// Requests to the server, and its stream of events.
//
// The login is kept in this module's memory only: not in a cookie, not in storage, not in a URL. A
// reload of the page asks for it again. Requests are made with `credentials: "omit"`, so the browser
// adds no login of its own and shows no dialog.

const SILENCE_MS = 10_000; // the server sends an event every 2 s
const RETRY_MS = 1_000;
const EVENT_CHARS_MAX = 16_000_000; // an event is 1 MB at most; more is not this server

let authorization = "";

export class Refused extends Error {
  constructor(status, details) {
    super(details.what);
    this.status = status;
    this.why = details.why || "";
    this.hint = details.try || "";
  }
}

export class Unreachable extends Error {}

function basic(user, password) {
  const bytes = new TextEncoder().encode(`${user}:${password}`);
  return "Basic " + btoa(Array.from(bytes, (byte) => String.fromCharCode(byte)).join(""));
}

export async function logIn(user, password) {
  authorization = basic(user, password);
  try {
    return await ask("GET", "/api/v1/console/me");
  } catch (error) {
    authorization = "";
    throw error;
  }
}

export function logOut() {
  authorization = "";
}

async function send(method, path, body, signal) {
  const headers = { authorization };
  if (body !== undefined) headers["content-type"] = "application/json";
  let response;
  try {
    response = await fetch(path, {
      method, headers, signal, credentials: "omit", cache: "no-store",
      body: body === undefined ? undefined : JSON.stringify(body),
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Unreachable("the server cannot be reached");
  }
  if (response.ok) return response;
  let details = { what: `the server answered ${response.status}` };
  try {
    details = (await response.json()).error || details;
  } catch { /* the answer is no JSON: the status says enough */ }
  throw new Refused(response.status, details);
}

export async function ask(method, path, body) {
  return (await send(method, path, body)).json();
}

export function query(fields) {
  const given = Object.entries(fields).filter(([, value]) => value !== "" && value != null);
  return given.length ? "?" + new URLSearchParams(given) : "";
}

// Yields the lines of an answer, until the caller stops.
export async function* lines(path) {
  const stop = new AbortController();
  try {
    const response = await send("GET", path, undefined, stop.signal);
    const head = { seqno: response.headers.get("dcpd-seqno"), version: response.headers.get("dcpd-vb-uuid") };
    yield head;
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) break;
      const pieces = (rest + value).split("\n");
      rest = pieces.pop();
      for (const piece of pieces) yield JSON.parse(piece);
    }
  } finally {
    stop.abort();
  }
}

// The stream of events of one page. It reconnects by itself until `stop`, and rests while the page
// is hidden. `on.state` gets each event, `on.link` whether there is a connection, `on.me` who is
// logged in (with each connection, so that changed rights show), and `on.refused` is called when the
// server refuses the login.
export class Live {
  constructor(show, on) {
    this.show = show;
    this.on = on;
    this.after = 0;
    this.since = 0;
    this.boot = "";
    this.asksAgain = false;
    this.isStopped = false;
    this.wake = () => {};
    this.watch = () => (document.hidden ? this.abort?.abort() : this.wake());
    document.addEventListener("visibilitychange", this.watch);
    this.run();
  }

  stop() {
    this.isStopped = true;
    document.removeEventListener("visibilitychange", this.watch);
    this.abort?.abort();
    this.wake();
  }

  async run() {
    while (!this.isStopped) {
      if (!document.hidden) {
        try {
          await this.read();
        } catch (error) {
          if (this.isStopped) return;
          if (error instanceof Refused && (error.status === 401 || error.status === 403)) {
            this.on.refused(error);
            return;
          }
        }
        if (this.isStopped) return;
        if (this.asksAgain) {
          this.asksAgain = false;
          continue;
        }
        if (!document.hidden) this.on.link(false);
      }
      await new Promise((resolve) => {
        this.wake = resolve;
        if (!document.hidden) setTimeout(resolve, RETRY_MS);
      });
    }
  }

  async read() {
    const abort = (this.abort = new AbortController());
    const path = "/api/v1/console/events" + query({
      show: this.show, after: this.after, since: this.since, boot: this.boot });
    let timer = setTimeout(() => abort.abort(), SILENCE_MS);
    try {
      const response = await send("GET", path, undefined, abort.signal);
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      let rest = "";
      for (;;) {
        const { value, done } = await reader.read();
        if (done) return;
        clearTimeout(timer);
        timer = setTimeout(() => abort.abort(), SILENCE_MS);
        rest += value;
        if (rest.length > EVENT_CHARS_MAX) throw new Error("an event is too long");
        const blocks = rest.split("\n\n");
        rest = blocks.pop();
        for (const block of blocks) this.take(block);
      }
    } finally {
      clearTimeout(timer);
      abort.abort();
    }
  }

  take(block) {
    const [first, second] = block.split("\n");
    if (this.isStopped) return;
    if (first === "event: rights") {
      this.asksAgain = true; // the next connection tells the new rights
      return;
    }
    const state = JSON.parse(second.slice("data: ".length));
    const isNewRun = this.boot !== "" && this.boot !== state.head.boot;
    this.boot = state.head.boot;
    this.after = state.head.sample;
    this.since = state.head.time_s;
    if (state.me) this.on.me(state.me);
    this.on.state(state, isNewRun);
    this.on.link(true);
  }
}
