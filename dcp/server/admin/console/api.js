// Requests to the server, and its streams of events.
//
// A login is a session of the browser: a cookie that scripts cannot read and that goes to this origin
// only (HttpOnly, SameSite=Strict). It counts only beside the header below, which no page of another
// origin can send. The page in which the password was typed keeps it in memory, to log in again when
// the server has restarted; it is not in storage and not in a URL, and a reload forgets it.

const LOGIN = "/api/v1/console/login";
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

// Who is logged in by the cookie; null: nobody. Scripts cannot see that cookie, so another one says
// that it may be there: each request without a login is in the server's log.
export async function whoIsIn() {
  if (!document.cookie.includes("dcpd-in-")) return null;
  try {
    return await ask("GET", "/api/v1/console/me");
  } catch (error) {
    if (error.status === 401) return null;
    throw error;
  }
}

const beginSession = async () =>
  (await request("POST", LOGIN, {}, undefined, { authorization })).json();

export async function logIn(user, password) {
  authorization = basic(user, password);
  try {
    return await beginSession();
  } catch (error) {
    authorization = "";
    throw error;
  }
}

export function logOut() {
  authorization = "";
  // Whatever comes of it: the server ends the session after a while.
  request("DELETE", LOGIN, {}).catch(() => {});
}

async function send(method, path, body, signal) {
  try {
    return await request(method, path, body, signal);
  } catch (error) {
    if (error.status !== 401 || !authorization) throw error;
    await beginSession(); // the server has restarted
    return request(method, path, body, signal);
  }
}

async function request(method, path, body, signal, login) {
  const headers = { "x-dcpd-console": "1", ...login };
  const isForm = body instanceof URLSearchParams;
  if (body !== undefined) headers["content-type"] = isForm ? "application/x-www-form-urlencoded" : "application/json";
  let response;
  try {
    response = await fetch(path, {
      method, headers, signal, credentials: "same-origin", cache: "no-store",
      body: body === undefined || isForm ? body?.toString() : JSON.stringify(body),
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

// On Couchbase's paths bodies are forms.
export const askForm = (method, path, fields) => ask(method, path, new URLSearchParams(fields));

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

// Yields {name, data} for each server-sent event of a path, until the server ends it. `abort` is an
// AbortController, which also ends a stream that is silent for too long.
async function* eventsOf(path, abort) {
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
      for (const block of blocks) {
        const [first, second] = block.split("\n");
        yield { name: first.slice("event: ".length), data: JSON.parse(second.slice("data: ".length)) };
      }
    }
  } finally {
    clearTimeout(timer);
    abort.abort();
  }
}

// Calls `onStep` with each event of a path until the function that it returns is called. It connects
// again by itself; `onLink` is told whether there is a connection, or why the server refuses one.
export function follow(path, onStep, onLink) {
  let isStopped = false, abort;
  (async () => {
    while (!isStopped) {
      abort = new AbortController();
      try {
        for await (const { name, data } of eventsOf(path, abort)) {
          if (isStopped) return;
          onLink({ isUp: true });
          if (name === "step") onStep(data);
        }
      } catch (error) {
        if (isStopped) return;
        if (error instanceof Refused) { onLink({ isUp: false, error }); return; }
      }
      if (!isStopped) onLink({ isUp: false });
      await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
    }
  })();
  return () => { isStopped = true; abort?.abort(); };
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
    for await (const { name, data } of eventsOf(path, abort)) this.take(name, data);
  }

  take(name, state) {
    if (this.isStopped) return;
    if (name === "rights") {
      this.asksAgain = true; // the next connection tells the new rights
      return;
    }
    const isNewRun = this.boot !== "" && this.boot !== state.head.boot;
    this.boot = state.head.boot;
    this.after = state.head.sample;
    this.since = state.head.time_s;
    if (state.me) this.on.me(state.me);
    this.on.state(state, isNewRun);
    this.on.link(true);
  }
}
